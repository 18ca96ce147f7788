"""Memory of one process of a training run, computed from the shapes of target and draft.

It leaves out the draft's own activations and torch itself, which do not depend on the mode.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from sametoken.model.block import Block
from sametoken.model.config import ModelConfig
from sametoken.runtime.cache import KVCache
from sametoken.train.dataset.extraction import PAGE

Mode = Literal["online", "offline", "sharded"]
NUMBER = 4  # bytes of a weight in training, of its gradient and of each of two moments
BUCKETS = 4  # bytes for each weight in which DistributedDataParallel sums gradients
DRAFT_VOCABULARY = 32000  # tokens of a head that guesses among a part of its target's
# What `forecast` says: mode, processes, and whether the draft is sharded.
USUAL: tuple[tuple[Mode, int, bool], ...] = (
    ("offline", 8, False), ("online", 8, False), ("sharded", 2, False), ("sharded", 8, False), ("sharded", 8, True),
    ("sharded", 16, True),
)  # fmt: skip


class TrainingMemory(NamedTuple):
    """Bytes in one process.

    Attributes:
        blocks: of the target: all of them (online), a share (sharded), or none (offline).
        gathered: the largest block, twice: as it is received, and as it computes.
        outer: token vectors and output layer of the target, whole in every mode.
        draft: weights, gradients, AdamW's moments; Muon needs a third less of the moments' place at most.
        states: hidden states of a forward's tokens, and the target's cache for them.
    """

    blocks: int
    gathered: int
    outer: int
    draft: int
    states: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def training_memory(
    config: ModelConfig, draft: int, mode: Mode, processes: int = 1, *, fsdp: bool = False, tokens: int = 2048,
    taps: int = 3, dtype: torch.dtype = torch.bfloat16,
) -> TrainingMemory:  # fmt: skip
    """The memory of a process.

    Args:
        config: of the target. `dtype`: it is computed in.
        draft: numbers that are trained.
        mode: whether the target runs whole, not at all, or sharded (`--fsdp-target`).
        fsdp: whether the draft is sharded.
        tokens: of a forward: `--train-bs` rows.
    """
    shares = processes if mode == "sharded" else 1
    sparse = (False,) * config.num_layers if config.experts is None else config.experts.layers
    kinds = {each: _rows(config, sparse.index(each), dtype) for each in set(sparse)}
    whole = [sum(rows * row for rows, row in kind) for kind in kinds.values()]
    own = sum(-(-rows // shares) * row for each in sparse for rows, row in kinds[each])
    outer = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size * dtype.itemsize
    runs = mode != "offline"
    cache = -(-(tokens + 1) // PAGE) * KVCache.bytes_per_page(config, PAGE, dtype) if runs else 0
    hidden = tokens * (taps + 1) * config.hidden_size * dtype.itemsize
    return TrainingMemory(
        own if runs else 0, 2 * max(whole) if shares > 1 else 0, outer, _draft(draft, processes, fsdp), cache + hidden
    )


def eagle3_weights(config: ModelConfig) -> int:
    """Weights of the matrices of an EAGLE-3 head as wide as its target, with a reduced vocabulary."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = 2 * hidden * (config.q_size + 2 * config.kv_size) + config.q_size * hidden
    return 3 * hidden * hidden + attention + 3 * hidden * inner + min(DRAFT_VOCABULARY, config.vocab_size) * hidden


def forecast(config: ModelConfig) -> dict[str, int]:
    """Bytes of one process that trains an EAGLE-3 head for a target, by how it is trained."""
    found, weights = {}, eagle3_weights(config)
    for mode, processes, fsdp in USUAL:
        name = {"offline": "hidden states on disk", "online": "whole target"}.get(mode, f"--fsdp-target, {processes}")
        total = training_memory(config, weights, mode, processes, fsdp=fsdp).total
        found[name + (" processes, --fsdp" if fsdp else " processes" if mode == "sharded" else "")] = total
    return found


def _rows(config: ModelConfig, layer: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Rows of each parameter of a block, and bytes of a row."""
    with torch.device("meta"):
        block = Block(config, layer, dtype, None)
    return [(len(each), each[0].numel() * each.element_size()) for each in block.parameters()]


def _draft(numbers: int, processes: int, fsdp: bool) -> int:
    """Bytes of the draft with its optimiser.

    While a sharded one computes, it is whole with its gradients, and both lie a second time where they are exchanged.
    """
    if processes == 1:
        return 4 * NUMBER * numbers
    if not fsdp:
        return (4 * NUMBER + BUCKETS) * numbers
    return 4 * NUMBER * -(-numbers // processes) + 4 * NUMBER * numbers
