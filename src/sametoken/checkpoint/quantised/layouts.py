"""Conversion of the stored tensors of a linear layer to its `Coded` weight: one function per layout of a tool.

Tensors on the meta device have no values; properties that only values show are assumed to be the usual ones. Shapes are
[out, in] unless noted. AWQ and GPTQ store [in, out], with 32 / bits codes in an int32, the first one lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sametoken.checkpoint.quantised.scheme import WeightScheme
from sametoken.errors import CheckpointError
from sametoken.kernels.cpu.variant import library
from sametoken.model.formats.coded import Code, Coded

Parts = Mapping[str, Tensor]

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # places of the codes of eight outputs in an int32
LAYOUTS = "the layouts that can be read are in docs/checkpoints.md"
DAMAGED = "the file is damaged, or another tool than the stated one wrote it"


def coded(parts: Parts, layer: WeightScheme, tool: str) -> Coded:
    """Weight of a linear layer.

    Args:
        parts: tensors of the layer by the last part of their names.
        layer: storage of the weight, as the checkpoint states it.
        tool: `quant_method` of the checkpoint.

    Raises:
        CheckpointError: tensors are missing, of another dtype or shape, or scales are not positive finite numbers.
    """
    layout = _layout(parts, tool)
    found = layout(parts, layer)
    _check_stated(found, layer)
    _check_scales(found)
    return found


def _layout(parts: Parts, tool: str) -> Callable[[Parts, WeightScheme], Coded]:
    if "qweight" in parts:
        return _awq if tool == "awq" else _gptq
    name = "weight" if "weight" in parts else "weight_packed"
    dtype = _part(parts, name).dtype
    known = {
        ("weight", torch.float8_e4m3fn): _fp8,
        ("weight", torch.int8): _int8,
        ("weight", torch.uint8): _nvfp4,
        ("weight_packed", torch.uint8): _fp4,
        ("weight_packed", torch.int32): _packed,
    }
    if (name, dtype) not in known:
        raise CheckpointError(f"its {name} holds {dtype}, expected one of {_dtypes(known)}; {LAYOUTS}")
    return known[name, dtype]


def _dtypes(known: Mapping[tuple[str, torch.dtype], object]) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in known}))


def _part(parts: Parts, *names: str) -> Tensor:
    """First of the named tensors that exists."""
    for name in names:
        if name in parts:
            return parts[name]
    raise CheckpointError(f"it has {', '.join(sorted(parts))} but no {' or '.join(names)}; {DAMAGED}")


def _shaped(name: str, tensor: Tensor, *shape: int) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"its {name} has shape {list(tensor.shape)}, expected {list(shape)}; {DAMAGED}")
    return tensor


def _matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise CheckpointError(f"its {name} has shape {list(tensor.shape)}, expected two dimensions; {DAMAGED}")
    return tensor.shape[0], tensor.shape[1]


def _rows(name: str, scale: Tensor, outputs: int) -> Tensor:
    """Scales [out, 1] from one number, or from one per output."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1)
    return _shaped(name, scale.reshape(-1, 1) if scale.dim() < 3 else scale, outputs, 1)


def _fp8(parts: Parts, layer: WeightScheme) -> Coded:
    """FP8 with a scale per weight, row or block; all scales are factors."""
    codes, scale = parts["weight"], _part(parts, "weight_scale", "weight_scale_inv").to(torch.float32)
    outputs, inputs = _matrix("weight", codes)
    if not _is_finite(codes):
        raise CheckpointError(f"its weight holds NaN; {DAMAGED}")
    if layer.block is None or scale.numel() == 1:
        return Coded(Code.FP8, codes, _rows("weight_scale", scale, outputs), inputs, inputs)
    high, wide = layer.block
    blocks = -(-outputs // high), -(-inputs // wide)
    scale = _shaped("scale", scale[:, 0, :, 0] if scale.dim() == 4 else scale, *blocks)
    return Coded(Code.FP8, codes, scale.repeat_interleave(high, 0)[:outputs], inputs, wide)


def _is_finite(codes: Tensor) -> bool:
    """True if float8_e4m3fn codes hold no NaN, or are on the meta device."""
    if codes.is_meta or not codes.numel():
        return True
    compiled = library() if codes.is_contiguous() else None
    if compiled is not None:
        return compiled.is_finite(codes)
    return bool(codes.view(torch.int8).amax() != 127 and codes.view(torch.uint8).amax() != 255)


def _nvfp4(parts: Parts, layer: WeightScheme) -> Coded:
    """Model-Optimizer's NVFP4: the scale of a group times the scale of the weight."""
    return _float4(parts, "weight", _part(parts, "weight_scale"), _part(parts, "weight_scale_2"), divided=False)


def _fp4(parts: Parts, layer: WeightScheme) -> Coded:
    """compressed-tensors' FP4: the scale of a group divided by the scale of the weight; MXFP4 has only exponents."""
    scale = _part(parts, "weight_scale")
    if scale.dtype == torch.uint8:
        return _float4(parts, "weight_packed", scale.view(torch.float8_e8m0fnu), None, divided=False)
    return _float4(parts, "weight_packed", scale, _part(parts, "weight_global_scale"), divided=True)


def _float4(parts: Parts, name: str, scale: Tensor, factor: Tensor | None, *, divided: bool) -> Coded:
    codes = parts[name]
    outputs, code_bytes = _matrix(name, codes)
    group = 16 if scale.dtype == torch.float8_e4m3fn else 32
    _shaped("weight_scale", scale, outputs, 2 * code_bytes // group)
    whole = None if factor is None else _rows("global scale", factor.to(torch.float32), outputs)[:, 0].contiguous()
    return Coded(Code.FP4, codes, scale, 2 * code_bytes, group, whole, divided=divided)


def _int8(parts: Parts, layer: WeightScheme) -> Coded:
    """compressed-tensors' int-quantized."""
    codes = parts["weight"]
    outputs, inputs = _matrix("weight", codes)
    scale = _part(parts, "weight_scale")
    groups = scale.shape[1] if scale.dim() == 2 and scale.numel() > 1 else 1
    scale = _rows("weight_scale", scale, outputs) if groups == 1 else _shaped("weight_scale", scale, outputs, groups)
    zero = parts.get("weight_zero_point")
    zero = (
        None
        if zero is None or (not zero.is_meta and not zero.any())
        else zero.to(torch.int8).reshape(-1, groups).expand(outputs, groups)
    )
    dynamic = layer.integer_rows and groups == 1 and zero is None
    group = inputs if scale.numel() == 1 else _group(layer, inputs, groups)
    return Coded(Code.INT8, codes, scale, inputs, group, zero=zero, dynamic=dynamic)


def _packed(parts: Parts, layer: WeightScheme) -> Coded:
    """compressed-tensors' pack-quantized: rows of codes, an int32 holding 32 / bits of them."""
    words, scale, shape = parts["weight_packed"], _part(parts, "weight_scale"), _part(parts, "weight_shape")
    if shape.is_meta:  # inputs are a multiple of 8: no word is partly filled
        outputs, inputs = words.shape[0], words.shape[1] * 32 // layer.bits
    else:
        outputs, inputs = (int(n) for n in shape.tolist())
    _shaped("weight_packed", words, outputs, -(-inputs * layer.bits // 32))
    groups = 1 if scale.numel() == 1 else _matrix("weight_scale", scale)[1]
    scale = (
        scale.reshape(1, 1).expand(outputs, 1)
        if scale.numel() == 1
        else _shaped("weight_scale", scale, outputs, groups)
    )
    zero = parts.get("weight_zero_point")
    if zero is not None:
        zero = _bytes_of(zero.t().contiguous(), layer.bits)[:, :outputs].t()
        zero = _centred(_shaped("weight_zero_point", zero, outputs, groups), layer.bits)
    codes = words.view(torch.uint8)[:, : -(-inputs * layer.bits // 8)]
    codes = codes if layer.bits == 4 else _centred(codes, 8)
    weight = Coded(_integer(layer), codes, scale, inputs, _group(layer, inputs, groups), zero=zero)
    return _ordered(weight, parts.get("weight_g_idx"))


def _awq(parts: Parts, layer: WeightScheme) -> Coded:
    words, scale = parts["qweight"], _part(parts, "scales")
    inputs, columns = _matrix("qweight", words)
    outputs, groups = 8 * columns, scale.shape[0]
    _shaped("scales", scale, groups, outputs)
    zeros = _shaped("qzeros", _part(parts, "qzeros"), groups, columns)
    zero = _awq_nibbles(zeros).to(torch.int8)
    compiled = None if words.is_meta or words.dtype != torch.int32 or inputs % 2 else library()
    codes = _halved(_awq_nibbles(words)) if compiled is None else compiled.awq_codes(words)
    return Coded(Code.INT4, codes, scale.t().contiguous(), inputs, _group(layer, inputs, groups), zero=zero)


def _awq_nibbles(words: Tensor) -> Tensor:
    """[out, in] uint8 codes of [in, out / 8] words."""
    places = torch.tensor(AWQ_PLACES)
    return _bytes_of(words, 4).view(*words.shape, 8)[:, :, places].flatten(1).t()


def _gptq(parts: Parts, layer: WeightScheme) -> Coded:
    words, scale = parts["qweight"], _part(parts, "scales")
    rows, outputs = _matrix("qweight", words)
    each, groups = 32 // layer.bits, scale.shape[0]
    inputs = rows * each
    _shaped("scales", scale, groups, outputs)
    zeros = _shaped("qzeros", _part(parts, "qzeros"), groups, -(-outputs // each))
    zero = _bytes_of(zeros, layer.bits)[:, :outputs].t().to(torch.int16) + layer.zero_offset
    zero = zero - (128 if layer.bits == 8 else 0)
    if not zero.is_meta and int(zero.max()) > 127:
        raise CheckpointError(f"its qzeros hold a zero point past the last code; {DAMAGED}")
    codes = _bytes_of(words.t(), 8)
    codes = codes if layer.bits == 4 else _centred(codes, 8)
    weight = Coded(
        _integer(layer), codes, scale.t().contiguous(), inputs, _group(layer, inputs, groups), zero=zero.to(torch.int8)
    )
    return _ordered(weight, parts.get("g_idx"))


def _integer(layer: WeightScheme) -> Code:
    return Code.INT4 if layer.bits == 4 else Code.INT8


def _group(layer: WeightScheme, inputs: int, groups: int) -> int:
    """Inputs that share a scale, for `groups` scales."""
    stated = layer.group
    if stated is None or stated < 0:
        stated = -(-inputs // groups)
    if -(-inputs // stated) != groups:
        raise CheckpointError(
            f"its scales are those of {groups} groups, expected {-(-inputs // stated)} groups of {stated} inputs "
            f"in {inputs}; {DAMAGED}"
        )
    return stated


def _bytes_of(words: Tensor, bits: int) -> Tensor:
    """Codes in the int32 `words`, the lowest first, uint8 [rows, columns * 32 / bits]."""
    if words.dtype != torch.int32:
        raise CheckpointError(f"its packed integers are {words.dtype}, expected int32; {DAMAGED}")
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack([found & 15, found >> 4], 2).flatten(1)


def _halved(nibbles: Tensor) -> Tensor:
    """[out, in / 2] uint8 of codes [out, in] below 16."""
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _centred(stored: Tensor, bits: int) -> Tensor:
    """Int8 values of bytes: 128 is subtracted from eight-bit codes; four-bit zero points stay unchanged."""
    return (stored ^ 128).view(torch.int8) if bits == 8 else stored.to(torch.int8)


def _ordered(weight: Coded, index: Tensor | None) -> Coded:
    """Weight with its inputs sorted by the groups in `index` [in], so that the inputs of a group adjoin."""
    inputs, group = weight.inputs, weight.group
    plain = torch.arange(inputs, dtype=torch.int32) // group
    if index is None or index.numel() == 0 or index.is_meta or (index.to(torch.int32) == plain).all():
        return weight
    _shaped("g_idx", index, inputs)
    order = torch.argsort(index.to(torch.int64), stable=True)
    if not torch.equal(index[order].to(torch.int32), plain):
        raise CheckpointError(f"its g_idx names groups of other sizes than {group} inputs; {DAMAGED}")
    codes = weight.codes
    if weight.code is Code.INT4:
        codes = _halved(torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, order])
    else:
        codes = codes[:, order]
    return Coded(weight.code, codes, weight.scale, inputs, group, zero=weight.zero, order=order.to(torch.int32))


def _check_stated(weight: Coded, layer: WeightScheme) -> None:
    bits = 4 if weight.code in (Code.FP4, Code.INT4) else 8
    if bits != layer.bits:
        raise CheckpointError(f"it holds codes of {bits} bits, the configuration states {layer.bits}; {DAMAGED}")
    if weight.inputs % 8 or (weight.group % 8 and weight.group < weight.inputs):
        raise CheckpointError(
            f"it has {weight.inputs} inputs in groups of {weight.group}, expected multiples of 8; use the unquantised "
            "checkpoint"
        )


def _check_scales(weight: Coded) -> None:
    """Check that scales are positive finite numbers; only a group of four-bit floats may be all zero."""
    if weight.scale.is_meta:
        return
    checked = [("global scale", weight.factors())]
    # Of the bytes of positive finite numbers the greatest is 126 (E4M3) or 254 (E8M0); torch is slow to convert them.
    greatest = {torch.float8_e4m3fn: 126, torch.float8_e8m0fnu: 254}.get(weight.scale.dtype, -1)
    if greatest < 0 or weight.scale.view(torch.uint8).amax() > greatest:
        checked.insert(0, ("scale", weight.scale.to(torch.float32)))
    for name, each in checked:
        low, high = (float(limit) for limit in torch.aminmax(each))
        zero = low == 0 and name == "scale" and weight.scale.dtype == torch.float8_e4m3fn
        if not ((low > 0 or zero) and high < float("inf")):
            raise CheckpointError(
                f"its {name}s lie between {low} and {high}, expected positive finite numbers; the file is damaged, or "
                "the quantisation failed"
            )
