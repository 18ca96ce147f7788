"""Assembly of the tensors of each quantised layer of a checkpoint into one `Coded` weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from sametoken.checkpoint.quantised.layouts import coded
from sametoken.checkpoint.quantised.scheme import Scheme, listed
from sametoken.errors import CheckpointError, UnsupportedModelError
from sametoken.model.formats.coded import Coded

# Last parts of names. A module with one of MARKS is quantised; RANGES are scales for the rounding of activations and of
# the KV cache, and are ignored: neither is rounded here.
WEIGHTS = ("weight", "weight_packed", "qweight")
MARKS = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_shape",
    "weight_zero_point", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
RANGES = (
    "input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "activation_scale", "output_scale",
    "q_scale", "k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point", "output_zero_point",
)  # fmt: skip
REFUSED = {
    "pre_quant_scale": "scales of the inputs (AWQ by Model-Optimizer)",
    "weight_bitmask": "a sparse layout",
}


class Item(NamedTuple):
    """Tensor, or weight of a quantised layer under the name of a plain weight."""

    name: str
    tensor: Tensor | Coded
    file: Path


def collected(stored: Iterable[Item], names: Iterable[str], scheme: Scheme) -> Iterator[Item]:
    """Yield the tensors, with those of a quantised layer replaced by its weight as soon as all of them are read.

    Args:
        stored: tensors in any order.
        names: names of all tensors.
        scheme: quantisation scheme of the checkpoint.

    Raises:
        CheckpointError: the tensors of a layer do not fit each other or the scheme.
        UnsupportedModelError: they need arithmetic that is not implemented.
    """
    wanted = modules(names)
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for item in stored:
        module, _, kind = item.name.rpartition(".")
        if kind in REFUSED:
            raise UnsupportedModelError(
                f"{item.name} holds {REFUSED[kind]}, which is not supported; {ANOTHER}", field=str(item.file)
            )
        if kind in wanted.get(module, ()) and isinstance(item.tensor, Tensor):
            parts[module][kind] = item.tensor
            if len(parts[module]) == len(wanted[module]):
                yield Item(f"{module}.weight", _weight(module, parts.pop(module), scheme, item.file), item.file)
        elif kind not in RANGES:
            yield item


ANOTHER = "use the unquantised checkpoint, or one that another tool quantised"


def modules(names: Iterable[str]) -> dict[str, set[str]]:
    """Last parts of the names of the tensors of each quantised module's weight, by module."""
    found: dict[str, set[str]] = defaultdict(set)
    plain = set()
    for name in names:
        module, _, kind = name.rpartition(".")
        if kind in MARKS:
            found[module].add(kind)
        elif kind in WEIGHTS:
            plain.add(module)
    for module in found.keys() & plain:
        found[module].add("weight")
    return dict(found)


def _weight(module: str, parts: dict[str, Tensor], scheme: Scheme, file: Path) -> Coded:
    layer = scheme.layer(module)
    if layer is None:
        raise CheckpointError(
            f"{module} is stored quantised ({', '.join(sorted(parts))}), but the configuration states that it is "
            f"not (ignored: {listed(scheme.ignored)}); config.json and the weights do not belong together",
            field=str(file),
        )
    try:
        return coded(parts, layer, scheme.tool)
    except CheckpointError as error:
        raise type(error)(f"{module} ({scheme.name}): {error}", field=str(file)) from error
