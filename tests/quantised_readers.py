"""How compressed-tensors reads the weights that `sametoken quantize` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor


def read_elsewhere(directory: Path, format: str) -> dict[str, Tensor]:
    """The quantised weights as compressed-tensors reads them; of NVFP4 it reads the codes alone."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig

    assert package is not None
    (file,) = directory.glob("*.safetensors")
    stored = load_file(file)
    stated = json.loads((directory / "config.json").read_text())["quantization_config"]
    modules = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    found = {}
    for module in modules:
        parts = {
            name.rpartition(".")[2]: tensor
            for name, tensor in stored.items()
            if name.rpartition(".")[0] == module and not name.endswith("bias")
        }
        if format == "nvfp4":
            values = unpack_fp4_from_uint8(parts["weight"], len(parts["weight"]), 2 * parts["weight"].shape[1])
            scales = parts["weight_scale"].float() * parts["weight_scale_2"]
            found[module] = (values.float().unflatten(1, (-1, 16)) * scales.unsqueeze(2)).flatten(1)
        else:
            (scheme,) = QuantizationConfig.model_validate(stated).config_groups.values()
            found[module] = BaseCompressor.get_value_from_registry(stated["format"]).decompress(parts, scheme)["weight"]
    return found
