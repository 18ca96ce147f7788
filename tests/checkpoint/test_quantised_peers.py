"""What the tools' own readers say of the same tensors, bit for bit: compressed-tensors and transformers.

compressed-tensors also writes the tensors here. It is no dependency: without it its tests are skipped
(pip install compressed-tensors).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantised_makers import MADE
from sametoken.checkpoint.quantised.layouts import coded
from sametoken.checkpoint.quantised.scheme import read_scheme

WEIGHT = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)) * 0.3


def ours(parts: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    scheme = read_scheme({"quantization_config": config}, None)
    assert scheme is not None
    layer = scheme.layer("model.layers.0.mlp.up_proj")
    assert layer is not None
    return coded(parts, layer, scheme.tool).dequantize()


COMPRESSED = {
    "float-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
    ],
    "int-quantized": [{"num_bits": 8, "type": "int", "strategy": "channel"}],
    "pack-quantized": [
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
        {"num_bits": 4, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64},
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ],
    "nvfp4-pack-quantized": [{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}],
    "mxfp4-pack-quantized": [{"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}],
}


@pytest.mark.parametrize(
    ("form", "weights"), [(form, each) for form, all_ in COMPRESSED.items() for each in all_], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_reads_the_same(form: str, weights: dict[str, Any], dtype: torch.dtype) -> None:
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    assert package is not None
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    high, wide = weights.get("block_structure") or (
        (64, 256) if weights["strategy"] == "tensor" else (1, weights.get("group_size", 256))
    )
    blocks = WEIGHT.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
    low, top = blocks.amin((1, 3)), blocks.amax((1, 3))
    state: dict[str, Tensor] = {"weight": WEIGHT.to(dtype)}
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = generate_gparam(WEIGHT.min(), WEIGHT.max())
    scale, zero = calculate_qparams(low, top, args, global_scale=state.get("weight_global_scale"))
    scale = scale if form == "nvfp4-pack-quantized" else scale.to(dtype)
    state |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = {name: tensor.detach() for name, tensor in compressor.compress(dict(state), scheme).items()}
    theirs = compressor.decompress(dict(stored), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme.model_dump()},
    }  # fmt: skip
    assert torch.equal(ours(stored, config).to(theirs.dtype), theirs)


def test_transformers_reads_blocks_of_fp8_the_same() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts, _ = MADE["fp8-blocks"].make(WEIGHT)
    theirs = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
    assert torch.equal(ours(parts, MADE["fp8-blocks"].config), theirs)


def test_transformers_reads_mxfp4_the_same() -> None:
    """Its reader is of gpt-oss's experts: [experts, out, groups, 16] bytes and [experts, out, groups] exponents."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts, _ = MADE["mxfp4"].make(WEIGHT)
    blocks = parts["weight_packed"].view(1, 64, 8, 16)
    theirs = convert_moe_packed_tensors(blocks, parts["weight_scale"].view(1, 64, 8), dtype=torch.float32)
    assert torch.equal(ours(parts, MADE["mxfp4"].config), theirs[0].t())
