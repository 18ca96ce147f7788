"""Steps that are recorded once and replayed on the recorded tensors, as a CUDA graph is: nothing may be frozen in them.

All of test_captured.py runs again, in plain torch. A number of Python, or a tensor that a later step makes anew, would
keep its value of the recording; a look at a value is refused, as a capture refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_captured import *  # noqa: F403
from test_captured import KINDS, VOCAB, Pair, counted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_checks import ahead, prompts, said
from sametoken import SamplingParams
from sametoken.engine import captured
from sametoken.kernels.cpu import variant
from sametoken.runtime import cache
from sametoken.runtime.graphs import GraphKey, Graphs
from sametoken.speculation.verify import _search

ATEN = torch.ops.aten
REFUSED = {
    ATEN._local_scalar_dense.default: "looks at a value",
    ATEN.nonzero.default: "looks at values",
}


class Recording(TorchDispatchMode):
    """The operators of one step, in order, with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in REFUSED, f"{func} {REFUSED[func]}"
        if func is ATEN.equal.default:  # only a CPU looks for shortcuts, see test_no_synchronisation.py
            return False
        result = func(*args, **(kwargs or {}))
        numbers = func is ATEN.lift_fresh.default and result.dim() > 0
        assert not numbers, "a tensor is made of numbers of Python, which a replay repeats"
        self.steps.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Does the work again, into the tensors that the recording made."""
        for func, args, kwargs, recorded in self.steps:
            found = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old is not new and not _same_memory(old, new):
                    old.copy_(new)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


class Replays(Graphs):
    """`Graphs` of a device that captures, with recordings in place of CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.captures, self.recordings = True, dict[GraphKey, Recording]()

    def run(self, key: GraphKey, work: Callable[[], None], state: Sequence[Tensor]) -> None:
        if not self.captures:
            work()
            return
        if key not in self.recordings:
            kept = [tensor.clone() for tensor in state]
            recording = Recording()
            for mode in (nullcontext(), recording):  # first as a rehearsal: what is made once is made there
                with mode:
                    work()
                for tensor, before in zip(state, kept, strict=True):
                    tensor.copy_(before)
            self.recordings[key] = recording
        self.recordings[key].replay()


@pytest.fixture(autouse=True, scope="module")
def plain_torch() -> Iterator[None]:
    """No compiled kernels, whose work no recording sees; trees and paths by the code that CUDA takes."""
    with pytest.MonkeyPatch.context() as patch:
        status = variant.status()
        patch.setattr(variant, "_chosen", lambda: (None, status))
        patch.setattr(cache, "is_chain", lambda mask: True)
        patch.setattr(captured, "verify", _search)
        patch.setattr(captured, "Graphs", Replays)
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_trees_are_replayed(models: Pair, kind: str) -> None:
    """test_captured.py notes what they guess, and no capture allows that."""
    plain, other = KINDS[kind](models), KINDS[kind](models)
    keys = ahead(other)
    params = [SamplingParams(temperature=0.9, seed=7 + i, max_tokens=n, ignore_eos=True) for i, n in enumerate((30, 9))]
    for _ in range(2):
        expected, found = plain.generate(prompts(2, VOCAB), params), other.generate(prompts(2, VOCAB), params)
        assert [said(each) for each in found] == [said(each) for each in expected]
        assert [counted(each) for each in found] == [counted(each) for each in expected]
    assert other.engine.captured is not None
    graphs = other.engine.captured.graphs
    assert isinstance(graphs, Replays)
    assert 0 < len(graphs.recordings) < len(keys)


@pytest.mark.parametrize("frozen", ["a number", "a tensor made outside"])
def test_a_frozen_value_shows(frozen: str) -> None:
    """What the other tests rely on: a replay repeats what Python held when the step was recorded."""
    graphs, state, outside = Replays(torch.device("cpu")), torch.zeros(1), [torch.ones(1)]
    key = GraphKey("none", 0, 1, 512, (), torch.float32, True)

    def work() -> None:
        state.add_(float(len(outside)) if frozen == "a number" else outside[-1])

    for _ in range(2):
        graphs.run(key, work, [state])
        outside.append(torch.full((1,), 2.0))
    assert state.item() == 2
    state.zero_()
    work()
    assert state.item() > 1


def test_a_look_at_a_value_is_refused() -> None:
    with pytest.raises(AssertionError, match="looks at a value"), Recording():
        torch.ones(1).item()
