"""Filling of a module's parameters from stored tensors, each row exactly once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from sametoken.checkpoint.contents import NAMES_SHOWN
from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.mapping import ParameterRows, Places
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.errors import CheckpointError, UnsupportedModelError
from sametoken.kernels.cpu.memory import lent_memory, new_memory, release
from sametoken.model.formats.coded import Coded
from sametoken.model.linear import Embedding, Linear

CHUNK = 1 << 20  # values of a quantised tensor that are dequantised at once
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MANY_ROWS = 2**16  # rows of a tensor (of the vocabulary) after which freed memory is returned to the system


def load_parameters(
    module: nn.Module,
    stored: Iterable[Stored | Item],
    rules: Places,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    pack: bool = True,
    filled: Callable[[str], None] = lambda submodule: None,
) -> None:
    """Fill every parameter of `module`, built on the meta device, from stored tensors in any order.

    A parameter is allocated when its first piece is read. When all parameters of a submodule are complete, its method
    `pack()` is called if it has one, and may replace them.

    Args:
        module: module with its parameters on the meta device.
        stored: stored tensors, for example from `read_tensors`.
        rules: place of each stored name.
        dtype: dtype of the parameters after loading.
        device: device of the parameters after loading.
        pack: false for training: `pack()` is not called, and quantised weights are dequantised.
        filled: called with the name of a submodule when all its own parameters are complete; it may replace them.

    Raises:
        CheckpointError: names are missing, unexpected or duplicate (all reported together), a shape does not fit,
            or a weight is not a finite number.
        UnsupportedModelError: a tensor is not of a floating type.
    """
    filling = _Filling(module, dtype, torch.device(device), pack, filled)
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
            if len(filling.rows(place)) > MANY_ROWS:
                release()
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
    """State of `load_parameters`: the rows of each parameter that are filled."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device, pack: bool, filled: Callable[[str], None]
    ) -> None:
        self.module, self.dtype, self.device, self.pack, self.filled = module, dtype, device, pack, filled
        # Listed before packing, which may remove parameters from the module.
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        self.claimed: dict[str, list[range]] = defaultdict(list)
        self.coded: dict[str, bool] = {}  # true for a parameter with quantised parts
        self.waiting = Counter({name: shape[0] for name, shape in self.shapes.items()})
        self.open = Counter(_parent(name) for name in self.shapes)

    def rows(self, place: ParameterRows) -> range:
        return range(self.shapes[place.parameter][0]) if place.rows is None else place.rows

    def claim(self, place: ParameterRows) -> bool:
        """Reserve the rows of a place; return False if one of them is reserved already."""
        rows, taken = self.rows(place), self.claimed[place.parameter]
        if any(rows.start < other.stop and other.start < rows.stop for other in taken):
            return False
        taken.append(rows)
        return True

    def fill(self, place: ParameterRows, item: Stored | Item) -> None:
        """Copy a stored tensor into its rows, and pack the submodule if that completes it."""
        name, rows, stored = place.parameter, self.rows(place), item.tensor
        expected = (len(rows), *self.shapes[name][1:])
        if tuple(item.tensor.shape) != expected:
            raise CheckpointError(
                f"{item.name} has shape {list(item.tensor.shape)}, expected {list(expected)} for {name}; "
                "config.json and the weights describe different models",
                field=str(item.file),
            )
        module = self.module.get_submodule(_parent(name))
        linear = isinstance(module, Linear) and name.endswith(".weight")
        dense = item.file.name == LINK or getattr(module, "dense", False)
        if isinstance(stored, Coded) and self.pack and (linear or not dense or self._reads_rows(module, stored)):
            self._adopt(name, rows, item, stored)
            self._arrived(name, len(rows))
            return
        if isinstance(stored, Tensor) and stored.dtype not in PLAIN:
            raise UnsupportedModelError(
                f"{item.name} holds {stored.dtype}, expected a floating type of 16 bits or more, or scales beside "
                "it; use the unquantised checkpoint",
                field=str(item.file),
            )
        self._check_alike(name, item, coded=linear and self.pack and isinstance(stored, Coded))
        if isinstance(stored, Tensor) and isinstance(module, Linear) and linear and self._packs_parts(module):
            finite = module.place(rows.start, stored)  # the only copy
        else:
            target = self._parameter(name)[rows.start : rows.stop]
            copy_numbers(stored, target)
            # aminmax propagates NaN and Inf, without the mask of the size of the tensor that isfinite needs.
            finite = target.is_meta or bool(torch.stack(torch.aminmax(target)).isfinite().all())
        if not finite:
            raise CheckpointError(
                f"{item.name} holds NaN or Inf as {self.dtype}; the file is damaged, the training diverged, or the "
                "values need a wider dtype",
                field=str(item.file),
            )
        self._arrived(name, len(rows))

    def _rounds(self, module: nn.Module, own: str) -> bool:
        """True for a plain weight that `pack` replaces by one of fewer bits."""
        return self.pack and own == "weight" and isinstance(module, Linear) and module.format is not None

    def _packs_parts(self, module: Linear) -> bool:
        return self.pack and module.packs_plain(self.device)

    def _reads_rows(self, module: nn.Module, stored: Coded) -> bool:
        return isinstance(module, Embedding) and module.adopts(stored)

    def _adopt(self, name: str, rows: range, item: Stored | Item, weight: Coded) -> None:
        """Set a quantised weight in its linear layer or embedding, without dequantising it."""
        module = self.module.get_submodule(_parent(name))
        if not isinstance(module, Linear | Embedding):
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
        """Raise UnsupportedModelError if some parts of a parameter are quantised and others are not."""
        if self.coded.setdefault(name, coded) != coded:
            words = ("quantised", "plain") if coded else ("plain", "quantised")
            raise UnsupportedModelError(
                f"{item.name} is {words[0]} and other parts of {name} are {words[1]}, expected one format for all of "
                "them; use another version of the model",
                field=str(item.file),
            )

    def missing(self, rules: Places) -> list[str]:
        """Names of the stored tensors for the rows that are still empty."""
        waiting = [name for name, left in self.waiting.items() if left]
        return [source for name in waiting for source in rules.sources(name, self.claimed[name])]

    def _parameter(self, name: str) -> Tensor:
        parameter = self.module.get_parameter(name)
        if parameter.is_meta:
            module, own = self.module.get_submodule(_parent(name)), name.rpartition(".")[2]
            dtype = torch.float32 if own in getattr(module, "float32", ()) else self.dtype
            if self.device.type == "cpu" and self._rounds(module, own):  # `pack` drops it
                data = lent_memory(parameter.shape, dtype)
            else:
                data = new_memory(parameter.shape, dtype, self.device)
            parameter = nn.Parameter(data, requires_grad=False)
            setattr(module, own, parameter)
        return parameter.data

    def _arrived(self, name: str, rows: int) -> None:
        self.waiting[name] -= rows
        if self.waiting[name]:
            return
        parent = _parent(name)
        self.open[parent] -= 1
        if self.open[parent]:
            return
        pack = getattr(self.module.get_submodule(parent), "pack", None)
        if self.pack and pack is not None:
            pack()
        self.filled(parent)


def copy_numbers(stored: Tensor | Coded, target: Tensor) -> None:
    """Copy a tensor, dequantised some rows at a time, since torch needs several copies in float32."""
    if isinstance(stored, Tensor):
        target.copy_(stored)
    if target.is_meta or isinstance(stored, Tensor):
        return
    size = max(1, CHUNK // stored.inputs)
    for first in range(0, len(target), size):
        rows = slice(first, first + size)
        stored.outputs(rows).dequantize_to(target[rows])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _listed(kind: str, names: list[str]) -> list[str]:
    """List of one phrase for a kind of problem; empty without names."""
    if not names:
        return []
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return [f"{len(names)} {kind}: {', '.join(names[:NAMES_SHOWN])}{more}"]


def _is_empty_bias(item: Stored | Item) -> bool:
    """True for a bias of zeros, which GPTQ's tools write for layers without a bias."""
    bias = item.tensor if item.name.endswith(".bias") else None
    return isinstance(bias, Tensor) and (bias.is_meta or not bias.any())
