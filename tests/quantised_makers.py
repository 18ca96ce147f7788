"""Small checkpoints in other tools' formats, and the numbers that they mean, by code of the tests' own.

Codes are chosen as integers and packed by shifts of 64-bit integers, as each tool's documents describe; what a weight
means is computed from the integers before they are packed, in float64 rounded once or as the tool rounds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Parts = dict[str, Tensor]


class Made(NamedTuple):
    """A format: what config.json states, and what makes a weight's tensors and meaning [out, in] of plain numbers."""

    config: dict[str, Any]
    make: Callable[[Tensor], tuple[Parts, Tensor]]


def groups(weight: Tensor, size: int) -> Tensor:  # [out, groups, size]
    return weight.float().unflatten(1, (-1, weight.shape[1] if size == -1 else size))


def packed(codes: Tensor, bits: int) -> Tensor:
    """[rows, columns * bits / 32] int32 of codes [rows, columns], the first one lowest."""
    places = torch.arange(32 // bits) * bits
    values = (codes.long().unflatten(1, (-1, len(places))) << places).sum(2)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def integers(
    weight: Tensor, size: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [out, in], zero points and scales [out, groups]."""
    grouped, top = groups(weight, size), 2**bits - 1
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if symmetric:
        scale = (torch.maximum(-low, high) / (top // 2)).to(dtype)
        zero = torch.full_like(scale, 2 ** (bits - 1), dtype=torch.float32)
    else:
        scale = ((high - low) / top).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, top)
    codes = (grouped / scale.float().unsqueeze(2) + zero.unsqueeze(2)).round().clamp(0, top)
    return codes.flatten(1).int(), zero.int(), scale


def meaning(codes: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    size = codes.shape[1] // scale.shape[1]
    return (codes.unflatten(1, (-1, size)) - zero.unsqueeze(2)).float().mul(scale.float().unsqueeze(2)).flatten(1)


def float8(scales: str, size: int = 32) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    """`scales` of a tensor, of rows or of square blocks, of which the last ones may be parts."""

    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        if scales == "tensor":
            scale = whole = (weight.abs().max() / 448).float()
        elif scales == "rows":
            scale = whole = (weight.abs().amax(1, keepdim=True) / 448).float()
        else:
            rows, columns = weight.shape
            padded = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
            blocks = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size))
            scale = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)
            whole = scale.float().repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
        codes = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if scales == "blocks" else "weight_scale"
        return {"weight": codes, name: scale, "input_scale": torch.tensor(0.5)}, codes.float() * whole

    return make


def float4(size: int, tool: str) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        grouped = groups(weight, size)
        wanted = grouped.abs().amax(2) / 6
        if size == 32:  # powers of two
            exponent = wanted.log2().ceil().int()
            stored, scale = (exponent + 127).to(torch.uint8), torch.exp2(exponent.float())
        elif tool == "modelopt":
            factor = weight.abs().max() / 6 / 448
            stored = (wanted / factor).to(torch.float8_e4m3fn)
            scale = stored.float() * factor
        else:
            factor = 6 * 448 / weight.abs().max()
            stored = (wanted * factor).to(torch.float8_e4m3fn)
            scale = stored.float() / factor
        scaled = grouped / scale.unsqueeze(2)
        index = (scaled.abs().unsqueeze(3) - FP4).abs().argmin(3)
        codes = (index + 8 * (scaled < 0)).flatten(1)
        meant = (FP4[index] * torch.where(scaled < 0, -1.0, 1.0) * scale.unsqueeze(2)).flatten(1)
        two = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        if size == 32:
            return {"weight_packed": two, "weight_scale": stored}, meant
        if tool == "modelopt":
            return {"weight": two, "weight_scale": stored, "weight_scale_2": factor, "input_scale": factor}, meant
        return {"weight_packed": two, "weight_scale": stored, "weight_global_scale": factor.reshape(1)}, meant

    return make


def awq(size: int) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, zero, scale = integers(weight, size, 4, False, torch.float16)

        def interleaved(x: Tensor) -> Tensor:  # [in or groups, out / 8]
            return packed(x.t().unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1), 4)

        parts = {"qweight": interleaved(codes), "qzeros": interleaved(zero), "scales": scale.t().contiguous()}
        return parts, meaning(codes, zero, scale)

    return make


def gptq(size: int, bits: int = 4, offset: int = 1, ordered: bool = False, symmetric: bool = False) -> Any:
    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if ordered else torch.arange(inputs)
        codes, zero, scale = integers(weight[:, order], size, bits, symmetric, torch.float16)
        zero = zero.clamp(min=offset)
        back = order.argsort()
        parts = {
            "qweight": packed(codes[:, back], bits).t().contiguous(),  # words run along the inputs: [in / 8, out]
            "qzeros": packed((zero - offset).t(), bits),
            "scales": scale.t().contiguous(),
            "g_idx": (torch.arange(inputs) // (inputs if size == -1 else size))[back].int(),
        }
        return parts, meaning(codes, zero, scale)[:, back]

    return make


def words(
    size: int, bits: int = 4, symmetric: bool = True, ordered: bool = False
) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    """compressed-tensors' pack-quantized."""

    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if ordered else torch.arange(inputs)
        codes, zero, scale = integers(weight[:, order], size, bits, symmetric, torch.bfloat16)
        back = order.argsort()
        parts = {
            "weight_packed": packed(codes[:, back], bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = packed(zero.t(), bits).t().contiguous()
        if ordered:
            parts["weight_g_idx"] = (torch.arange(inputs) // size)[back].int()
        return parts, meaning(codes, zero, scale)[:, back]

    return make


def bytes_(weight: Tensor) -> tuple[Parts, Tensor]:
    """compressed-tensors' int-quantized."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight / scale.float()).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.float()


def compressed(
    kind: str, bits: int, format: str, strategy: str, size: int | None = None, rows: int | None = None
) -> Any:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": size, "symmetric": True}
    activations = None if rows is None else {"num_bits": rows, "type": kind, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
    }  # fmt: skip


def gptq_config(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **keys}


MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
MADE: dict[str, Made] = {
    "fp8": Made({**MODELOPT, "quant_algo": "FP8"}, float8("tensor")),
    "fp8-rows": Made(compressed("float", 8, "float-quantized", "channel", rows=8), float8("rows")),
    "fp8-blocks": Made({"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}, float8("blocks")),
    "fp8-fbgemm": Made({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, float8("rows")),
    "nvfp4": Made({**MODELOPT, "quant_algo": "NVFP4"}, float4(16, "modelopt")),
    "nvfp4-compressed": Made(
        compressed("float", 4, "nvfp4-pack-quantized", "tensor_group", 16, 4), float4(16, "compressed-tensors")
    ),
    "mxfp4": Made(compressed("float", 4, "mxfp4-pack-quantized", "group", 32), float4(32, "compressed-tensors")),
    "awq": Made({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    "awq-128": Made({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, awq(128)),
    "gptq": Made(gptq_config(), gptq(32)),
    "gptq-rows": Made(gptq_config(group_size=-1, sym=True), gptq(-1, symmetric=True)),
    "gptq-64-order": Made(gptq_config(group_size=64, desc_act=True), gptq(64, ordered=True)),
    "gptq-v2": Made(gptq_config(checkpoint_format="gptq_v2"), gptq(32, offset=0)),
    "gptq-8": Made(gptq_config(bits=8), gptq(32, bits=8)),
    "w4a16": Made(compressed("int", 4, "pack-quantized", "group", 32), words(32)),
    "w4a16-zeros": Made(compressed("int", 4, "pack-quantized", "group", 64), words(64, symmetric=False)),
    "w4a16-rows": Made(compressed("int", 4, "pack-quantized", "channel"), words(-1)),
    "w4a16-order": Made(compressed("int", 4, "pack-quantized", "group", 32), words(32, ordered=True)),
    "w8a16": Made(compressed("int", 8, "pack-quantized", "group", 32), words(32, 8)),
    "w8a16-zeros": Made(compressed("int", 8, "pack-quantized", "channel"), words(-1, 8, symmetric=False)),
    "w8a8": Made(compressed("int", 8, "int-quantized", "channel", rows=8), bytes_),
}  # fmt: skip
# As published, in blocks larger than most weights of tiny models.
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}


PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
IMAGES = ("vision_model.", "visual.", "vision_tower.", "multi_modal_projector.")


def is_chosen(name: str, tensor: Tensor, chosen: tuple[str, ...] = PROJECTIONS) -> bool:
    """Whether a tensor of a checkpoint is a weight of its decoder with one of these parts in its name."""
    return tensor.dim() == 2 and any(part in name for part in chosen) and not any(part in name for part in IMAGES)


def quantised(
    source: Path, name: str, target: Path, plain: Path | None = None, chosen: tuple[str, ...] = PROJECTIONS
) -> Path:
    """A copy of a checkpoint with some of its weights in a format.

    Args:
        plain: where to write a checkpoint of the numbers that it means, in float32.
        chosen: parts of the names of weights that are quantised.
    """
    config, make = Made(DEEPSEEK, float8("blocks", 128)) if name == "fp8-deepseek" else MADE[name]
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    (file,) = source.glob("*.safetensors")
    for key, tensor in load_file(file).items():
        if is_chosen(key, tensor, chosen):
            parts, meant[key] = make(tensor.float())
            stored |= {f"{key.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            stored[key] = meant[key] = tensor
    for directory, tensors, more in ((target, stored, {"quantization_config": config}), (plain, meant, {})):
        if directory is not None:
            shutil.copytree(source, directory)
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, directory / file.name)
            stated = directory / "config.json"
            stated.write_text(json.dumps({**json.loads(stated.read_text()), **more}))
    return target
