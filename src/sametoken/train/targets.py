"""Outputs of a frozen target for training: hidden states of a document, token embedding and output layer.

Either the target runs in the process, or its hidden states are on disk and its blocks are never loaded.
Legend: S tokens of a document, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.load import load_decoder, read_weights
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.errors import DataError
from sametoken.learning.target import Features, OuterLayers
from sametoken.model.config import ModelConfig
from sametoken.model.layers import RMSNorm
from sametoken.model.linear import Embedding, Linear
from sametoken.train.dataset.extraction import FeatureReader, features
from sametoken.train.dataset.hidden_states import StoredStates
from sametoken.train.dataset.prepared import Prepared

Source = Callable[[int, Tensor], Features]  # features of a sample by its number and its tokens [S]
BatchSource = Callable[[Sequence[int], Sequence[Tensor]], Features]  # features of several, concatenated


def one_by_one(source: Source) -> BatchSource:
    """Source of batches that reads one sample at a time."""

    def read(samples: Sequence[int], documents: Sequence[Tensor]) -> Features:
        found = [source(sample, tokens) for sample, tokens in zip(samples, documents, strict=True)]
        return Features(*(torch.cat(each) for each in zip(*found, strict=True)))

    return read


def check_data(directory: Path, taps: tuple[int, ...], data: Prepared) -> None:
    """Raise for samples or hidden states of another target.

    Args:
        directory: checkpoint of the target.
        taps: blocks whose outputs are needed.

    Raises:
        DataError: the samples or the stored hidden states belong to another model, or to other blocks.
    """
    data.check_target(directory)
    longest = max(data.lengths())
    limit = ModelConfig.from_hf(read_config(directory)).max_position
    if longest > limit:
        raise DataError(
            f"{data.directory}: a sample has {longest} tokens, the target {directory} was made for {limit}; prepare "
            f"the data with --max-len {limit}"
        )
    stored = data.hidden_states
    if taps and stored is not None and stored.taps != taps:
        raise DataError(
            f"{data.directory}: found hidden states of blocks {stored.taps}, expected {taps}; extract them with "
            f"--taps {','.join(map(str, taps))}, or train with --taps {','.join(map(str, stored.taps))}"
        )


def run(directory: Path, taps: tuple[int, ...], longest: int, dtype: torch.dtype, device: torch.device) -> Source:
    """Source that runs the target on one document at a time, in pieces."""
    reader = FeatureReader(load_decoder(directory, dtype, device), taps, longest)

    def read(sample: int, tokens: Tensor) -> Features:
        return features(reader(tokens))

    return read


def from_disk(stored: StoredStates, dtype: torch.dtype, device: torch.device) -> Source:
    """Source of stored hidden states."""

    def read(sample: int, tokens: Tensor) -> Features:
        found = stored[sample]
        if len(found.last) != len(tokens):
            raise DataError(f"sample {sample} has {len(tokens)} tokens, its hidden states {len(found.last)}")
        return Features(*(part.to(device, dtype) for part in found))

    return read


class _Outer(nn.Module):
    """Parameters of a decoder outside its blocks."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype, tied=config.tie_word_embeddings)
        self.head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, False, dtype)


class _Last(nn.Module):
    """Parameters of a decoder between its blocks and its output layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, config.norm_shift)


def read_outer(directory: Path, dtype: torch.dtype, device: torch.device) -> OuterLayers:
    """Read token embedding and output layer of a checkpoint, without its blocks."""
    config = ModelConfig.from_hf(read_config(directory))
    with torch.device("meta"):
        outer = _Outer(config, dtype)
    _fill(outer, directory, dtype, device)
    vectors = outer.embed.weight.detach()
    return OuterLayers.of(config, vectors, vectors if outer.head is None else outer.head.weight.detach())


def read_norm(directory: Path, dtype: torch.dtype) -> RMSNorm:
    """Read the final norm of a checkpoint."""
    config = ModelConfig.from_hf(read_config(directory))
    with torch.device("meta"):
        last = _Last(config, dtype)
    _fill(last, directory, dtype, torch.device("cpu"))
    return last.norm


def _fill(part: nn.Module, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Load the parameters of a module by their names in the decoder."""
    rules = rules_for(ModelConfig.from_hf(read_config(directory)))
    wanted = {name for name, _ in part.named_parameters()}

    def stored() -> Iterator[Stored | Item]:
        for item in read_weights(directory):
            place = rules.place(item.name)
            if place is not None and place.parameter in wanted:
                yield item

    load_parameters(part, stored(), rules, dtype, device, pack=False)
