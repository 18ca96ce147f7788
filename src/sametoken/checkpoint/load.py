"""Loading of a checkpoint directory as a decoder, with quantised layers and experts assembled on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from sametoken.checkpoint import weight_cache
from sametoken.checkpoint.cut import own_part
from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.gguf import LINK, given_path
from sametoken.checkpoint.gguf.directory import read_gguf
from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item, collected
from sametoken.checkpoint.tensors import WEIGHT_FILES, Stored, read_tensors, tensor_names, weight_files
from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from sametoken.kernels.cpu.memory import release
from sametoken.kernels.cpu.threads import serial_torch
from sametoken.kernels.cpu.variant import library
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.model.decoder import Decoder
from sametoken.model.formats.names import FORMATS
from sametoken.runtime.ranks import RankPart

LOG = logging.getLogger("sametoken")
WHOLE = RankPart()


def load_decoder(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    max_seq_len: int | None = None,
    quantization: str = "none",
    part: RankPart = WHOLE,
    *,
    cache: bool = False,
    watch: Callable[[], object] = lambda: None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> Decoder:
    """Load the decoder of a checkpoint directory with its weights.

    Args:
        directory: directory with config.json and weights, as `hub.resolve` returns it.
        dtype: dtype of the plain parameters, independent of the files'.
        device: device of the parameters.
        max_seq_len: longest sequence in tokens; None for the limit in config.json.
        quantization: a name in `model.formats.names`, or "none".
        part: part of the decoder that this process holds.
        cache: true to read packed weights from `weight_cache`, or write them there.
        watch: called before each tensor; an error that it raises ends loading.
        rope_scaling: RoPE in place of the file's, see `ModelConfig.from_hf`.

    Raises:
        CheckpointError: a file is missing, unreadable or does not fit the configuration.
        UnsupportedModelError: the architecture or the weight format is not implemented.
        ConfigError: the weights are quantised already, or cannot be cut into `part.size` parts.
    """
    stated = read_config(directory)
    refuse_to_round_again(directory, quantization)
    device = torch.device(device)
    try:
        config = ModelConfig.from_hf(stated, max_seq_len, rope_scaling)
        if config.refused_on_cuda is not None and device.type == "cuda":
            raise UnsupportedModelError(config.refused_on_cuda)
        rules, own = rules_for(config), cut(config, part)
        if rules.images:
            LOG.warning(f"{directory} also reads images; only its text part is loaded")
        entry = None
        if cache and part == WHOLE:
            entry = weight_cache.entry_of(directory, config.parameters, quantization, dtype, device)
        decoder = _empty(own, dtype, quantization)
        if entry is not None and weight_cache.exists(entry):
            decoder.begin_rope_tables(device)
            if weight_cache.restored(decoder, entry):
                return decoder
            decoder = _empty(own, dtype, quantization)  # the first one is partly filled
        # Compiled code reads the weights in parallel; in the remaining work, torch's threads would wait for each other.
        compiled = device.type == "cpu" and library() is not None
        with serial_torch() if compiled else nullcontext():
            stored = own_part(_watched(decoder_weights(directory, config), watch), config, rules, part)
            load_parameters(decoder, stored, rules_for(own), dtype, device)
        release()
        if entry is not None:
            weight_cache.keep(decoder, entry)
    except CheckpointError as error:
        if error.field:
            raise
        raise error.about(str(given_path(directory))) from error
    return decoder


def _watched(stored: Iterator[Item], watch: Callable[[], object]) -> Iterator[Item]:
    for item in stored:
        watch()
        yield item


def _empty(config: ModelConfig, dtype: torch.dtype, quantization: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(config, dtype, FORMATS.get(quantization))


def refuse_to_round_again(directory: Path, quantization: str, option: str = "quantization") -> None:
    """Raise `ConfigError` if weights that are quantised already would be rounded to another format.

    Args:
        directory: directory of a model or a head.
        quantization: a name in `model.formats.names`, or "none".
        option: name of the option, for the error.
    """
    if quantization != "none" and (scheme := stored_scheme(directory)) is not None:
        raise ConfigError(
            f"{option} {quantization!r}: the weights of {given_path(directory)} are quantised already "
            f"({scheme.name}); leave it out, or give the unquantised checkpoint"
        )


def read_weights(
    directory: Path,
    names: Sequence[str] = WEIGHT_FILES,
    wanted: Callable[[str], bool] = lambda name: True,
    *,
    data: bool = True,
) -> Iterator[Stored | Item]:
    """Iterate over the tensors of a model or a head, with those of each quantised layer as one weight.

    Args:
        names: names of weight files; the first that exists is read.
        wanted: true for the names of tensors to yield, and of all tensors of their quantised layers.
        data: false for tensors on the meta device, from the headers alone.

    Raises:
        CheckpointError: as `read_tensors`; also for quantised layers whose tensors do not fit each other or
            config.json.
        UnsupportedModelError: the weights are stored in a format that is not implemented.
    """
    scheme = stored_scheme(directory)
    if scheme is None:
        return (item for item in read_tensors(directory, names, data=data) if wanted(item.name))
    if scheme.tool == "gguf":
        file = directory / LINK
        return (Item(name, tensor, file) for name, tensor in read_gguf(file, data=data) if wanted(name))
    seen: list[str] = []
    for file in weight_files(directory, names):
        if file.suffix != ".safetensors":
            words = "holds quantised weights, expected them in safetensors; convert the file to that"
            raise CheckpointError(words, field=str(file))
        seen += filter(wanted, tensor_names(file))
    stored = (Item(*item) for item in read_tensors(directory, names, data=data) if wanted(item.name))
    return collected(stored, seen, scheme)


def decoder_weights(directory: Path, config: ModelConfig) -> Iterator[Item]:
    """Iterate over the tensors of a decoder, with separate weights for each expert; raise as `read_weights`."""
    stored = (Item(*item) for item in read_weights(directory))
    return single_experts(stored, config, stored_scheme(directory))
