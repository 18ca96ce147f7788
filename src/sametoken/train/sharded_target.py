"""Frozen target whose blocks are sharded over the processes of a run (FSDP2), which read their batches in lockstep.

Each process stores a share of every block, and gathers a whole block only during its computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.load import decoder_weights
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item
from sametoken.learning.target import Features, OuterLayers
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import chain_mask
from sametoken.train.dataset.extraction import PAGE, features
from sametoken.train.targets import BatchSource

GATHERED_TOKENS = 2048  # tokens of a document per forward; long, since each forward gathers the whole target


class _Inner(nn.Module):
    """Parts of a decoder that are read from its files: all but the outer layers, which a run has already."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.blocks, self.norm = decoder.blocks, decoder.norm


def load_sharded(directory: Path, outer: OuterLayers, dtype: torch.dtype, mesh: DeviceMesh) -> Decoder:
    """Load a decoder without output head, sharding each block as soon as it is read.

    Args:
        outer: outer layers of the same checkpoint, whose token embedding is shared, not copied.
        mesh: mesh of the processes.

    Raises:
        CheckpointError: the target cannot be loaded.
    """
    config, device = outer.config, outer.vectors.device
    with torch.device("meta"):
        decoder = Decoder(config, dtype)
    decoder.head = None
    decoder.embed.weight = nn.Parameter(outer.vectors, requires_grad=False)
    inner, rules = _Inner(decoder), rules_for(config)
    wanted = {name for name, _ in inner.named_parameters()}
    # Submodules of each block that were not read yet.
    missing = [{name.rpartition(".")[0] for name, _ in block.named_parameters()} for block in decoder.blocks]

    def stored() -> Iterator[Item]:
        for item in decoder_weights(directory, config):
            place = rules.place(item.name)
            if place is None or place.parameter in wanted:
                yield item

    def shard(name: str) -> None:
        part, _, rest = name.partition(".")
        if part == "blocks":
            number, _, submodule = rest.partition(".")
            missing[int(number)].remove(submodule)
            if not missing[int(number)]:
                fully_shard(decoder.blocks[int(number)], mesh=mesh, reshard_after_forward=True)

    load_parameters(inner, stored(), rules, dtype, device, pack=False, filled=shard)
    sharded = {id(parameter) for block in decoder.blocks for parameter in block.parameters()}
    fully_shard(decoder, mesh=mesh, ignored_params={p for p in decoder.parameters() if id(p) not in sharded})
    return decoder


def read_in_step(decoder: Decoder, taps: tuple[int, ...], most: Callable[[int], int]) -> BatchSource:
    """Source of hidden states of batches from `load_sharded`; all processes must call it equally often.

    Args:
        taps: 0-based blocks whose outputs are returned.
        most: function for the maximum over the processes.
    """

    @torch.no_grad()
    def read(samples: Sequence[int], documents: Sequence[Tensor]) -> Features:
        cache = _cache(decoder, [len(tokens) for tokens in documents])
        pieces = -(-max(map(len, documents)) // GATHERED_TOKENS)
        found: list[list[Tensor]] = [[] for _ in documents]
        for turn in range(most(pieces)):  # a process without further pieces reads its last piece again
            start = min(turn, pieces - 1) * GATHERED_TOKENS
            rows = [row for row, tokens in enumerate(documents) if len(tokens) > start]
            parts = [documents[row][start : start + GATHERED_TOKENS] for row in rows]
            spans = [_span(row, start, len(part), part.device) for row, part in zip(rows, parts, strict=True)]
            hidden = decoder.run(torch.cat(parts), cache, spans, taps)
            states = torch.stack([*hidden.taps, decoder.norm(hidden.last)], dim=1)
            for row, part in zip(rows, torch.split(states, [len(part) for part in parts]), strict=True):
                found[row] += [part] if turn < pieces else []
        return features(torch.cat([part for row in found for part in row]))

    return read


def _cache(decoder: Decoder, lengths: Sequence[int]) -> KVCache:
    """KV cache with one document per row."""
    device, pages = decoder.embed.device, [-(-(length + 1) // PAGE) for length in lengths]
    table = PageTable(len(lengths), sum(pages) + 1, max(pages), PAGE, device)
    first = 1
    for row, count in enumerate(pages):
        table.extend(row, range(first, first + count))
        first += count
    return KVCache.of(decoder.config, table, decoder.dtype, device)


def _span(row: int, start: int, count: int, device: torch.device) -> Span:
    """Span of new tokens of a document after the earlier ones."""
    rows, starts = torch.tensor([row], device=device), torch.tensor([start], device=device)
    return Span(rows, (row,), starts, chain_mask(1, count, device), count, start + count)
