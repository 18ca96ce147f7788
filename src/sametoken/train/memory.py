"""Memory of one process of a training run, from the shapes of target and draft.

Activations of the draft, and the memory of torch itself, are left out; they do not depend on the mode.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from sametoken.model.block import Block
from sametoken.model.config import ModelConfig
from sametoken.runtime.cache import KVCache
from sametoken.train.dataset.extraction import PAGE

Mode = Literal["offline", "online", "sharded"]
NUMBER = 4  # bytes of a trained weight, of its gradient, and of each of two moments
BUCKETS = 4  # bytes per weight for the sums of gradients of DistributedDataParallel
DRAFT_VOCABULARY = 32000  # tokens of a head with a reduced vocabulary
PROCESSES = 8  # of a sharded target in `forecast`


class TrainingMemory(NamedTuple):
    """Bytes in one process.

    Attributes:
        blocks: blocks of the target: all of them (online), a share (sharded), or none (offline).
        gathered: two copies of the largest block of a sharded target: received, and computing.
        outer: embeddings and lm_head of the target, whole in every mode.
        draft: weights, gradients and moments of AdamW; Muon needs less.
        states: hidden states of the tokens of a forward, and the target's KV cache for them.
    """

    blocks: int
    gathered: int
    outer: int
    draft: int
    states: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


def training_memory(
    config: ModelConfig, draft: int, mode: Mode, processes: int = 1, *, fsdp: bool = False, tokens: int = 2048,
    taps: int = 3, dtype: torch.dtype = torch.bfloat16,
) -> TrainingMemory:  # fmt: skip
    """Memory of one process.

    Args:
        config: configuration of the target.
        draft: number of trained weights.
        mode: "online" with the whole target, "offline" without it, "sharded" with `--fsdp-target`.
        processes: number of processes.
        fsdp: true if the draft is sharded.
        tokens: tokens of a forward: `--train-bs` rows.
        taps: number of tapped hidden states.
        dtype: data type of the target.
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
    """Number of weights of an EAGLE-3 head of the target's width, with a reduced vocabulary."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = 2 * hidden * (config.q_size + 2 * config.kv_size) + config.q_size * hidden
    return 3 * hidden * hidden + attention + 3 * hidden * inner + min(DRAFT_VOCABULARY, config.vocab_size) * hidden


def forecast(config: ModelConfig) -> dict[str, int]:
    """Bytes of one of `PROCESSES` processes that train an EAGLE-3 head for a target, by mode."""
    weights, modes = eagle3_weights(config), get_args(Mode)
    return {mode: training_memory(config, weights, mode, PROCESSES).total for mode in modes}


def _rows(config: ModelConfig, layer: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Rows of each parameter of a block, and bytes of a row."""
    with torch.device("meta"):
        block = Block(config, layer, dtype, None)
    return [(len(each), each[0].numel() * each.element_size()) for each in block.parameters()]


def _draft(numbers: int, processes: int, fsdp: bool) -> int:
    """Bytes of the draft with its optimiser.

    A sharded draft is whole with its gradients during a step, with a second copy of both in the exchange.
    """
    if processes == 1:
        return 4 * NUMBER * numbers
    if not fsdp:
        return (4 * NUMBER + BUCKETS) * numbers
    return 4 * NUMBER * -(-numbers // processes) + 4 * NUMBER * numbers
