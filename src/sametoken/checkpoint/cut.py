"""Cut of stored tensors to the part of one tensor-parallel rank, before they are copied into memory.

Queries, keys, values, gates, ups and logits are cut by outputs, `out` and `down` by inputs. A plain tensor is a view
of its mapped file until it is copied, so that no rank has a whole tensor in memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from sametoken.checkpoint.mapping import DecoderRules
from sametoken.checkpoint.quantised.collect import Item
from sametoken.errors import UnsupportedModelError
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded
from sametoken.runtime.ranks import Columns, RankPart

BY_INPUTS = ("out", "down")


def own_part(stored: Iterable[Item], config: ModelConfig, rules: DecoderRules, part: RankPart) -> Iterator[Item]:
    """Yield the tensors of a rank's part.

    Args:
        stored: tensors of the whole model, from `load.decoder_weights`.
        config: configuration of the whole model.
        rules: places of the whole model's tensors.
        part: part of the rank.

    Raises:
        UnsupportedModelError: a quantised weight cannot be cut there; the message lists numbers of ranks that work.
    """
    for item in stored:
        place = rules.place(item.name)
        if place is None or part.size == 1:
            yield item
            continue
        module, _, kind = place.parameter.rpartition(".")
        layer = module.rpartition(".")[2]
        if layer in BY_INPUTS and kind == "weight":
            yield item._replace(tensor=_inputs(item, part))
        elif layer in BY_INPUTS:  # added by rank 0 alone, since the outputs of all ranks are summed
            whole = item.tensor
            yield item._replace(tensor=torch.zeros_like(whole) if part.rank and isinstance(whole, Tensor) else whole)
        elif layer == "head" and not part.whole_head:
            yield item._replace(tensor=_rows(item.tensor, [Columns.of(part, config.vocab_size).own]))
        elif (sizes := _pieces(layer, kind, item, config, place.rows)) is not None:
            yield item._replace(tensor=_outputs(item.tensor, sizes, part))
        else:
            yield item


def _pieces(layer: str, kind: str, item: Item, config: ModelConfig, rows: range | None) -> Sequence[int] | None:
    """Number of outputs of each piece of a tensor, each of which is cut; None if the tensor stays whole."""
    outputs = item.tensor.shape[0]
    if kind == "sinks":
        return [outputs]
    if layer == "qkv":
        return [config.q_size, config.kv_size, config.kv_size] if rows is None else [outputs]
    if layer == "gate_up":
        return [outputs // 2, outputs // 2] if rows is None else [outputs]
    return None


def _outputs(tensor: Tensor | Coded, sizes: Sequence[int], part: RankPart) -> Tensor | Coded:
    """Outputs of the part in each piece, concatenated."""
    begin, own = 0, []
    for size in sizes:
        share = part.of(size)
        own.append(range(begin + share.start, begin + share.stop))
        begin += size
    return _rows(tensor, own)


def _rows(tensor: Tensor | Coded, own: Sequence[range]) -> Tensor | Coded:
    """Ranges of outputs, concatenated."""
    if isinstance(tensor, Coded):
        return tensor.outputs(torch.cat([torch.arange(each.start, each.stop) for each in own]))
    cut = [tensor[each.start : each.stop] for each in own]
    return cut[0] if len(cut) == 1 else torch.cat(cut)


def _inputs(item: Item, part: RankPart) -> Tensor | Coded:
    """Inputs of the part."""
    tensor = item.tensor
    share = part.of(tensor.shape[1])
    if isinstance(tensor, Tensor):
        return tensor[:, share.start : share.stop]
    try:
        return tensor.part_of_inputs(share, part.size)
    except ValueError as error:
        raise UnsupportedModelError(f"tensor_parallel_size {part.size}: {item.name}: {error}") from error
