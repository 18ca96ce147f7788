"""What any drafter's proposal must satisfy, and a count of the work a call does that knows nothing of the clock."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import sametoken.drafters
from sametoken.control.worth import Worth
from sametoken.drafters.base import Drafter
from sametoken.drafters.padded import padded
from sametoken.speculation.draft import PADDING, Draft

DRAFTERS = str(Path(sametoken.drafters.__file__).parent)


def drafted(
    drafter: Drafter, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Any, *worth: Worth
) -> Draft:
    """A drafter's proposal as tensors."""
    return padded(pending, drafter.propose(rows, pending, limits, sampling, *worth).drafts)


def tree_paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root's child to every node that is not padding, in node order."""
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return [path for path in paths[1:] if PADDING not in path]


def check_draft(draft: Draft, pending: Sequence[int], limits: Sequence[int], nodes: int) -> None:
    """A well-formed draft: root, topological parents, padding at the end, no path over its limit, no equal siblings."""
    tokens, parents = draft
    assert tokens.dtype == parents.dtype == torch.int64
    assert tokens.shape == parents.shape == (len(pending), tokens.shape[1])
    assert 1 <= tokens.shape[1] <= 1 + nodes
    assert tokens[:, 0].tolist() == list(pending)
    assert (parents[:, 0] == -1).all()
    assert (parents[:, 1:] >= 0).all()
    assert (parents < torch.arange(tokens.shape[1])).all()
    padding = tokens == PADDING
    assert (padding[:, 1:] >= padding[:, :-1]).all(), "padding precedes a node"
    assert (padding.sum(1) == 0).any() or not len(pending), "no row needs the last node"
    for row, limit in enumerate(limits):
        paths = tree_paths(draft, row)
        assert len(paths) == tokens.shape[1] - 1 - int(padding[row].sum())
        assert len(paths) == len(set(paths)), "siblings repeat a token"
        assert all(len(path) <= limit for path in paths)


def mixed_text(length: int) -> list[int]:
    """Tokens with the heavy tail of words, so that some contexts recur often, some rarely and some never."""
    generator = random.Random(3)
    return [int(1 / (generator.random() + 1e-3)) for _ in range(length)]


def work_of_steps(drafter: Any, text: list[int], context: int, steps: int) -> tuple[int, int]:
    """Work after `context` tokens: the drafters' lines that `steps` steps run, and the bytes one proposal takes."""
    drafter.admit(0, text[:context])

    def step(token: int) -> None:
        drafter.propose([0], [token], [8], None)
        drafter.observe([0], [[token]], None)

    lines = sum(lines_run(partial(step, token)) for token in text[context : context + steps])
    return lines, bytes_taken(partial(drafter.propose, [0], [text[context + steps]], [8], None))


def lines_run(call: Callable[[], Any]) -> int:
    """Lines of the drafters' own code that `call` executes, every turn of a loop counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(DRAFTERS):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def bytes_taken(call: Callable[[], Any]) -> int:
    """Most memory that `call` holds above what was held before: a copy of the context would show here."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
