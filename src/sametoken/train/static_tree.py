"""Static tree of a head, measured on the target's own answers and written to the head's directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sametoken.checkpoint.places import target_directory
from sametoken.engine.llm import LLM
from sametoken.errors import ConfigError
from sametoken.heads.objective import FixedTrees
from sametoken.heads.read import read_head
from sametoken.heads.write import write_head
from sametoken.kinds import named
from sametoken.learning.modes import TRAINED
from sametoken.options.sampling import SamplingParams
from sametoken.train.evaluate import Question
from sametoken.train.targets import read_outer, run

ANSWER = 64  # tokens generated for the measurement


def write_tree(
    directory: Path, target: str, llm: LLM, questions: Sequence[Question], nodes: int
) -> tuple[tuple[int, ...], ...]:
    """Measure a head on the target's own answers and write its best tree into its directory.

    Raises:
        ConfigError: the head's kind has no static trees, or no guess was ever correct.
    """
    place = target_directory(target)
    device = llm.engine.table.table.device
    outer = read_outer(place, getattr(torch, llm.config.dtype), device)
    head = read_head(directory, outer.config, outer.head.dtype, device, pack=False).module
    objective = _objective(head.config.kind, directory)
    answers = llm.generate([question.ids for question in questions], SamplingParams(max_tokens=ANSWER, temperature=0))
    texts = [(len(each.prompt_token_ids), [*each.prompt_token_ids, *each.token_ids]) for each in answers]
    source = run(place, (), max(len(tokens) for _, tokens in texts), outer.head.dtype, device)
    tokens = [torch.tensor(each, device=device) for _, each in texts]
    states = [source(i, each).last for i, each in enumerate(tokens)]
    starts = [start for start, _ in texts]
    paths = objective.best_tree(head, outer, zip(tokens, states, starts, strict=True), nodes)
    if not paths:
        raise ConfigError(f"{directory}: not one guess was right in {len(texts)} answers; train the heads first")
    stored = read_head(directory, outer.config, getattr(torch, head.config.dtype), "cpu", pack=False).module
    write_head(objective.with_tree(stored, paths), directory, outer.config, target_name=target)
    return paths


def _objective(name: str, directory: Path) -> type[FixedTrees]:
    """Class that writes trees for heads of this kind. Raises ConfigError if the kind has no trees."""
    trained = {each.kind.name: each.training for each in TRAINED.values()}
    if name not in trained or not trained[name].tree:
        able = " or ".join(named(each).title for each, training in trained.items() if training.tree)
        raise ConfigError(f"--write-tree is for {able} heads, {directory} holds {named(name).what}; leave it out")
    found: type[FixedTrees] = named(name).load(trained[name].objective)
    return found
