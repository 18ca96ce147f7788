"""A Llama checkpoint rounded to AWQ's layout (gemm): 4 bits, groups of 128 inputs, zero points, no search of scales."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GROUP = 128
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs stands in which four bits of a word, from the lowest
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def words(codes: Tensor) -> Tensor:
    """Codes [n, out] as 32-bit words [n, out / 8]."""
    eights = codes.unflatten(1, (-1, 8))[:, :, ORDER].to(torch.int64)
    shifts = torch.arange(0, 32, 4)
    return (eights << shifts).sum(2).to(torch.uint32).view(torch.int32)


def rounded(weight: Tensor) -> dict[str, Tensor]:
    """The three tensors of a linear layer with weight [out, in]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float().unsqueeze(2) + zero.unsqueeze(2)).round().clamp(0, 15).flatten(1)
    return {"qweight": words(codes.t()), "qzeros": words(zero.t()), "scales": scale.t().contiguous()}


def write(model: Path, out: Path) -> None:
    """Writes the directory `out`; embeddings, norms and lm_head stay as they are."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                tensor = opened.get_tensor(name)
                if name.endswith("_proj.weight"):
                    stem = name.removesuffix("weight")
                    tensors |= {stem + part: value for part, value in rounded(tensor).items()}
                else:
                    tensors[name] = tensor
    part = out.with_suffix(".part")
    part.mkdir(parents=True)
    save_file(tensors, part / "model.safetensors", {"format": "pt"})
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, part)
    config = json.loads((model / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}, indent=1))
    part.rename(out)
