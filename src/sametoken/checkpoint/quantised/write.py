"""Conversion of a rounded weight to the tensors that other tools read, and entries of a checkpoint of such weights.

The reverse of `layouts` and `scheme`: compressed-tensors for all formats but NVFP4, which is Model-Optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.model.formats.coded import Coded
from sametoken.model.formats.rounding import GREATEST_FP4, GREATEST_FP8, Rounding, rounding_of

Parts = dict[str, Tensor]


class StoredFormat(NamedTuple):
    """Format to which weights are rounded.

    Attributes:
        format: a key of LAYOUTS and of `model.formats.rounding.ROUNDINGS`.
        group: inputs that share a scale, if the format has a choice; None for its default.
    """

    format: str
    group: int | None = None

    @property
    def rounding(self) -> Rounding:
        """Rounding of a weight to the format."""
        return rounding_of(self.format, self.group)


class Layout(NamedTuple):
    """Layout of a format's tensors in a checkpoint.

    Attributes:
        parts: function of a weight and of the greatest absolute input that returns the weight's tensors by the last
            part of their names.
        form: compressed-tensors' name for the layout; None for Model-Optimizer's.
        weights: compressed-tensors' arguments of weights.
        rows: compressed-tensors' arguments of activations; None if these stay plain.
    """

    parts: Callable[[Coded, float], Parts]
    form: str | None = None
    weights: Mapping[str, Any] | None = None
    rows: Mapping[str, Any] | None = None


def _scaled(weight: Coded, peak: float) -> Parts:
    return {"weight": weight.codes, "weight_scale": weight.scale}


def _packed(weight: Coded, peak: float) -> Parts:
    """Four-bit codes, eight to an int32, the first one lowest, which is the order of `codes`."""
    outputs, inputs = weight.shape
    codes = torch.nn.functional.pad(weight.codes, (0, -weight.codes.shape[1] % 4)).contiguous()
    shape = torch.tensor([outputs, inputs], dtype=torch.int64)
    return {"weight_packed": codes.view(torch.int32), "weight_scale": weight.scale, "weight_shape": shape}


def _mxfp4(weight: Coded, peak: float) -> Parts:
    return {"weight_packed": weight.codes, "weight_scale": weight.scale.view(torch.uint8)}


def _nvfp4(weight: Coded, peak: float) -> Parts:
    """`input_scale` maps the greatest input to the greatest product of a code and a scale."""
    scales = {"weight_scale": weight.scale, "weight_scale_2": weight.factors()[0].clone()}
    return {"weight": weight.codes, **scales, "input_scale": torch.tensor(peak / (GREATEST_FP4 * GREATEST_FP8))}


def _arguments(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


LAYOUTS: dict[str, Layout] = {
    "fp8": Layout(
        _scaled, "float-quantized", _arguments("float", 8, "channel"), _arguments("float", 8, "token", dynamic=True)
    ),
    "int8": Layout(
        _scaled, "int-quantized", _arguments("int", 8, "channel"), _arguments("int", 8, "token", dynamic=True)
    ),
    "int4": Layout(_packed, "pack-quantized", _arguments("int", 4, "group")),
    "mxfp4": Layout(
        _mxfp4, "mxfp4-pack-quantized",
        _arguments("float", 4, "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
    ),
    "nvfp4": Layout(_nvfp4),
}  # fmt: skip


def stated(
    format: str, group: int | None, plain: Sequence[str], version: str = "", *, rows: bool = True
) -> dict[str, dict[str, Any]]:
    """Quantisation entries of a checkpoint, by file: those of "config.json" are added to it, other files are whole.

    Args:
        format: a key of LAYOUTS.
        group: inputs that share a scale; None for a row.
        plain: linear modules that stay plain.
        version: version of this package, for the name of the producer; "" leaves it out.
        rows: for NVFP4, true if the files have the scales of activations (`input_scale`).
    """
    layout = LAYOUTS[format]
    if layout.form is None:
        return _modelopt(format.upper() if rows else f"W4A16_{format.upper()}", group, plain, version, rows)
    weights = dict(layout.weights or {})
    if weights["strategy"] == "group":
        weights["group_size"] = group
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": layout.rows, "output_activations": None}
    return {
        "config.json": {
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": layout.form, "quantization_status": "compressed",
                "config_groups": {"group_0": {**scheme, "format": layout.form}}, "ignore": list(plain),
                "kv_cache_scheme": None, "global_compression_ratio": None,
            }
        }
    }  # fmt: skip


def _modelopt(
    algorithm: str, group: int | None, plain: Sequence[str], version: str, rows: bool
) -> dict[str, dict[str, Any]]:
    """Entries of Model-Optimizer's own file, and of config.json, where its newer versions have them.

    vLLM reads Model-Optimizer's file only if the producer is "modelopt".
    """
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group}
    activations = {"input_activations": numbers if rows else None}
    producer = {"name": "modelopt", "version": f"written by sametoken {version}".rstrip()}
    return {
        "config.json": {
            "quantization_config": {
                "quant_method": "modelopt", "quant_algo": algorithm, "group_size": group, "ignore": list(plain),
                "config_groups": {"group_0": {**activations, "weights": numbers, "targets": ["Linear"]}},
                "producer": producer,
            }
        },
        "hf_quant_config.json": {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": group,
                "exclude_modules": list(plain),
            },
        },
    }  # fmt: skip
