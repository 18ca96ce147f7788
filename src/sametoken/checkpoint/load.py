"""Checkpoint files into parameters: stream, rename, fuse, place; every parameter is filled exactly once.

Beside the finished weights, memory holds at most one stored tensor at a time. Source of the layouts: the
safetensors format and the `*.index.json` files of Hugging Face repositories.
"""

from __future__ import annotations

import errno
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sametoken.checkpoint.contents import of_directory
from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.gguf import LINK, given_path
from sametoken.checkpoint.gguf.directory import read_gguf
from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.mapping import ParameterRows, Places, rules_for
from sametoken.checkpoint.quantised.collect import Item, collected
from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError, shown
from sametoken.files import json_object
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.names import FORMATS
from sametoken.model.linear import Linear

WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    LINK,
)
FILE_NAME = re.compile(r"(?!\.)[^/\\\x00]{1,255}")
SHOWN = 8  # names of one kind in an error; a wrong architecture would otherwise print thousands
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DOWNLOAD_AGAIN = "download it again, or copy it again from where it is whole"


class Stored(NamedTuple):
    """One tensor as a file holds it; the data stay on disk until they are read."""

    name: str
    tensor: Tensor
    file: Path


class Seen(NamedTuple):
    """What a file says of a tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def load_decoder(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    max_seq_len: int | None = None,
    quantization: str = "none",
) -> Decoder:
    """The decoder of a checkpoint directory with its weights in place.

    Args:
        directory: holds config.json and weights, as `hub.resolve` returns it.
        dtype: of all parameters, whatever the files hold.
        device: where the parameters live.
        max_seq_len: longest sequence to serve; by default what config.json states.
        quantization: a name in `model.formats.names`, or "none".

    Raises:
        CheckpointError: a file is missing, unreadable or does not fit the configuration.
        UnsupportedModelError: the architecture or the weight format is not implemented.
        ConfigError: the weights are quantised already.
    """
    stated, scheme = read_config(directory), stored_scheme(directory)
    if scheme is not None and quantization != "none":
        raise ConfigError(
            f"quantization {quantization!r}: the weights of {given_path(directory)} are quantised already "
            f"({scheme.name}); leave it out, or give the unquantised checkpoint"
        )
    try:
        config = ModelConfig.from_hf(stated, max_seq_len)
        if config.sinks and torch.device(device).type == "cuda":
            raise UnsupportedModelError("attention with sinks (gpt-oss) is not supported on CUDA; use --device cpu")
        with torch.device("meta"):
            decoder = Decoder(config, dtype, FORMATS.get(quantization))
        load_parameters(decoder, decoder_weights(directory, config), rules_for(config), dtype, device)
    except CheckpointError as error:
        if error.field:
            raise
        raise error.about(str(given_path(directory))) from error
    return decoder


def read_tensors(directory: Path, names: Sequence[str] = WEIGHT_FILES) -> Iterator[Stored]:
    """Every tensor of a checkpoint directory, file by file in the order of the data.

    Reads `model.safetensors` or `pytorch_model.bin`, whole or sharded with an index.

    Args:
        names: the weight files that it may have, the first that is there counts.

    Raises:
        CheckpointError: there are no weights, an index names an absent file, or a file is damaged.
    """
    for file in weight_files(directory, names):
        yield from READERS[file.suffix](file)


def read_weights(directory: Path) -> Iterator[Stored | Item]:
    """The same of a model, with the tensors of each layer that another tool quantised as one weight.

    Raises:
        CheckpointError: also for quantised layers whose tensors do not fit each other or the configuration.
        UnsupportedModelError: the weights are stored in a format that is not implemented.
    """
    scheme = stored_scheme(directory)
    if scheme is None:
        return read_tensors(directory)
    if scheme.tool == "gguf":
        file = directory / LINK
        return (Item(name, tensor, file) for name, tensor in read_gguf(file))
    names: list[str] = []
    for file in weight_files(directory):
        if file.suffix != ".safetensors":
            words = "holds quantised weights, expected them in safetensors; convert the file to that"
            raise CheckpointError(words, field=str(file))
        names += _names(file)
    return collected((Item(*item) for item in read_tensors(directory)), names, scheme)


def decoder_weights(directory: Path, config: ModelConfig) -> Iterator[Item]:
    """The same, with each expert's weights under their own names; raises as above."""
    stored = (Item(*item) for item in read_weights(directory))
    return single_experts(stored, config, stored_scheme(directory))


def seen_tensors(directory: Path, names: Sequence[str] = WEIGHT_FILES) -> dict[str, Seen]:
    """Shape and dtype of every tensor of a checkpoint directory, without reading their data; raises as above."""
    return {item.name: Seen(tuple(item.tensor.shape), item.tensor.dtype) for item in read_tensors(directory, names)}


def weight_files(directory: Path, names: Sequence[str] = WEIGHT_FILES) -> list[Path]:
    """The files that hold the weights of a checkpoint directory, all of them present."""
    for name in names:
        if (directory / name).exists():
            return _shards(directory / name) if name.endswith(".json") else [directory / name]
    words = f"no weights, expected one of {', '.join(names)}: {of_directory(directory)}"
    raise CheckpointError(words, field=str(directory))


def load_parameters(
    module: nn.Module,
    stored: Iterable[Stored | Item],
    rules: Places,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    pack: bool = True,
) -> None:
    """Fill every parameter of `module`, built on the meta device, from stored tensors in any order.

    A parameter is allocated when its first piece arrives. When all parameters of a submodule that has a method
    `pack()` are whole, it is called, and may replace them.

    Args:
        module: holds the shapes; its parameters are on the meta device.
        stored: the tensors, for example from `read_tensors`.
        rules: where each name belongs.
        dtype: of the parameters after loading.
        device: of the parameters after loading.
        pack: whether to call `pack()` at all; what will be trained stays plain, and quantised weights become so.

    Raises:
        CheckpointError: names are missing, unexpected or duplicate (all reported together), a shape does not fit,
            or a weight is not a finite number.
        UnsupportedModelError: a tensor is not of a floating type.
    """
    filling = _Filling(module, dtype, torch.device(device), pack)
    unexpected, duplicate = [], []
    for item in stored:
        if rules.ignores(item.name):
            continue
        place = rules.place(item.name)
        if place is None or place.parameter not in filling.shapes:
            if not _is_empty_bias(item):
                unexpected.append(item.name)
        elif not filling.claim(place):
            duplicate.append(item.name)
        else:
            filling.fill(place, item)
    if any(name.removeprefix("model.") == "fc.weight" for name in unexpected):
        raise CheckpointError(
            "the weights do not match the configuration: fc.weight is part of an EAGLE head; give the head as --draft, "
            "and as MODEL the target that it was trained for"
        )
    problems = [
        *_listed("missing", filling.missing(rules)),
        *_listed("unexpected", unexpected),
        *_listed("duplicate", duplicate),
    ]
    if problems:
        raise CheckpointError(
            "the weights do not match the configuration: " + "; ".join(problems) + ". Check that config.json and "
            "the weight files belong to the same model, and that all of them were downloaded"
        )


class _Filling:
    """Which rows of which parameters have arrived."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device, pack: bool) -> None:
        self.module, self.dtype, self.device, self.pack = module, dtype, device, pack
        # Taken before anything is packed, since packing may take parameters out of the module.
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        self.claimed: dict[str, list[range]] = defaultdict(list)
        self.coded: dict[str, bool] = {}  # whether a parameter's parts are quantised
        self.waiting = Counter({name: shape[0] for name, shape in self.shapes.items()})
        self.open = Counter(_parent(name) for name in self.shapes)

    def rows(self, place: ParameterRows) -> range:
        return range(self.shapes[place.parameter][0]) if place.rows is None else place.rows

    def claim(self, place: ParameterRows) -> bool:
        """Reserve the rows of a place; False if some of them were already taken."""
        rows, taken = self.rows(place), self.claimed[place.parameter]
        if any(rows.start < other.stop and other.start < rows.stop for other in taken):
            return False
        taken.append(rows)
        return True

    def fill(self, place: ParameterRows, item: Stored | Item) -> None:
        """Copy a stored tensor into its rows, and pack the submodule if that made it whole."""
        name, rows, stored = place.parameter, self.rows(place), item.tensor
        expected = (len(rows), *self.shapes[name][1:])
        if tuple(item.tensor.shape) != expected:
            raise CheckpointError(
                f"{item.name} has shape {list(item.tensor.shape)}, expected {list(expected)} for {name}; "
                "config.json and the weights describe different models",
                field=str(item.file),
            )
        linear = isinstance(self.module.get_submodule(_parent(name)), Linear)
        if isinstance(stored, Coded) and self.pack and (linear or item.file.name != LINK):
            self._adopt(name, rows, item, stored)
            self._arrived(name, len(rows))
            return
        dense = stored.dequantize() if isinstance(stored, Coded) else stored
        if dense.dtype not in PLAIN:
            raise UnsupportedModelError(
                f"{item.name} holds {dense.dtype}, expected a floating type of 16 bits or more; use the unquantised "
                "checkpoint",
                field=str(item.file),
            )
        self._check_alike(name, item, coded=linear and self.pack and isinstance(stored, Coded))
        target = self._parameter(name)[rows.start : rows.stop]
        target.copy_(dense)
        # aminmax carries NaN and Inf through, without the mask as large as the tensor that isfinite would need.
        if not torch.stack(torch.aminmax(target)).isfinite().all():
            raise CheckpointError(
                f"{item.name} holds NaN or Inf as {self.dtype}; the file is damaged, the training diverged, or the "
                "values need a wider dtype",
                field=str(item.file),
            )
        self._arrived(name, len(rows))

    def _adopt(self, name: str, rows: range, item: Stored | Item, weight: Coded) -> None:
        """Leaves a quantised weight to its linear layer."""
        module = self.module.get_submodule(_parent(name))
        if not isinstance(module, Linear):
            raise UnsupportedModelError(
                f"{item.name} is quantised, which only linear layers can be; use another version of the model",
                field=str(item.file),
            )
        self._check_alike(name, item, coded=True)
        try:
            module.adopt(rows.start, weight.to(self.device))
        except ValueError as error:
            raise UnsupportedModelError(
                f"{item.name} cannot be joined with the other parts of {name}: found {error}, expected the same; use "
                "another version of the model",
                field=str(item.file),
            ) from error

    def _check_alike(self, name: str, item: Stored | Item, *, coded: bool) -> None:
        """Refuses a parameter of which some parts are quantised and others are not."""
        if self.coded.setdefault(name, coded) != coded:
            words = ("quantised", "plain") if coded else ("plain", "quantised")
            raise UnsupportedModelError(
                f"{item.name} is {words[0]} and other parts of {name} are {words[1]}, expected one format for all of "
                "them; use another version of the model",
                field=str(item.file),
            )

    def missing(self, rules: Places) -> list[str]:
        """Stored names that would fill the rows that have not arrived."""
        waiting = [name for name, left in self.waiting.items() if left]
        return [source for name in waiting for source in rules.sources(name, self.claimed[name])]

    def _parameter(self, name: str) -> Tensor:
        parameter = self.module.get_parameter(name)
        if parameter.is_meta:
            data = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
            parameter = nn.Parameter(data, requires_grad=False)
            setattr(self.module.get_submodule(_parent(name)), name.rpartition(".")[2], parameter)
        return parameter.data

    def _arrived(self, name: str, rows: int) -> None:
        self.waiting[name] -= rows
        if self.waiting[name]:
            return
        parent = _parent(name)
        self.open[parent] -= 1
        pack = getattr(self.module.get_submodule(parent), "pack", None)
        if self.pack and pack is not None and not self.open[parent]:
            pack()


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _listed(kind: str, names: list[str]) -> list[str]:
    """One phrase for a kind of problem, none if there is no such problem."""
    if not names:
        return []
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{more}"]


def _shards(index: Path) -> list[Path]:
    """The files that an index names, in order, all of them present."""
    try:
        stated = json_object(index).get("weight_map")
    except OSError as error:
        words = f"cannot be read ({error.strerror}); check its permissions"
        raise CheckpointError(words, field=str(index)) from error
    except ValueError as error:
        raise CheckpointError(str(error), field=str(index), advice=DOWNLOAD_AGAIN) from error
    if not isinstance(stated, dict):
        words = f"not an index with a weight_map, which is {shown(stated)}"
        raise CheckpointError(words, field=str(index), advice=DOWNLOAD_AGAIN)
    # An index comes from outside and may not point outside its own directory.
    if foreign := [name for name in stated.values() if not isinstance(name, str) or not FILE_NAME.fullmatch(name)]:
        words = f"names {shown(foreign[0])}, expected plain file names beside the index"
        raise CheckpointError(words, field=str(index))
    names = sorted(set(stated.values()))
    if absent := [name for name in names if not (index.parent / name).exists()]:
        raise CheckpointError(
            f"{len(absent)} of {len(names)} files are not there: {', '.join(absent[:SHOWN])}; "
            "the download stopped half-way: run it again",
            field=str(index),
        )
    return [index.parent / name for name in names]


def _is_empty_bias(item: Stored | Item) -> bool:
    """GPTQ's tools write biases of zeros for layers that have none."""
    return item.name.endswith(".bias") and isinstance(item.tensor, Tensor) and not item.tensor.any()


def _names(file: Path) -> list[str]:
    """Of a safetensors file's tensors, in the order of their data."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.offset_keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_damaged(file, error), field=str(file)) from error


def _read_safetensors(file: Path) -> Iterator[Stored]:
    try:
        for name in _names(file):
            # Opened anew for each tensor: one mapping for all would keep every page that was read resident.
            with safe_open(file, framework="pt") as opened:
                tensor = opened.get_tensor(name)
            yield Stored(name, tensor, file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_damaged(file, error), field=str(file)) from error


def _read_bin(file: Path) -> Iterator[Stored]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "holds more than tensors, or is damaged, and was not executed; convert it to safetensors", field=str(file)
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(_damaged(file, error), field=str(file)) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        words = "holds something else than a dictionary of tensors; convert it to safetensors"
        raise CheckpointError(words, field=str(file))
    for name, tensor in tensors.items():
        yield Stored(name, tensor, file)


def _read_gguf(file: Path) -> Iterator[Stored]:
    for name, tensor in read_gguf(file):
        yield Stored(name, tensor.dequantize() if isinstance(tensor, Coded) else tensor, file)


READERS = {".safetensors": _read_safetensors, ".bin": _read_bin, ".pt": _read_bin, ".gguf": _read_gguf}


def _damaged(file: Path, error: Exception) -> str:
    """Words for a weight file that cannot be read."""
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch seeks before the start of a truncated file
        return f"cannot be read ({error.strerror or error}); check its permissions, or {DOWNLOAD_AGAIN}"
    with file.open("rb") as opened:
        head = opened.read(40)
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository"
    reason = str(error).splitlines()[0]
    return f"truncated or damaged ({file.stat().st_size} bytes: {reason}); {DOWNLOAD_AGAIN}"
