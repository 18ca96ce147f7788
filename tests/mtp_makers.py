"""Tiny checkpoints with a random prediction block (MTP), and what transformers computes with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

import tiny_models
from cli_checks import speak
from engine_checks import sharpen

FAMILIES = ("deepseek-v3", "deepseek-v3-plain", "glm-4.5-moe", "mimo")
PARTS = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm"}


def _stored(name: str, tensor: Tensor, family: str, layers: int) -> list[tuple[str, Tensor]]:
    """A tensor of `MtpModel` under its names in the files of a family."""
    own = name.removeprefix("layers.0.").replace("mtp_block.", "")
    if family == "mimo":
        module, _, kind = own.rpartition(".")
        own = f"{PARTS.get(module, module)}.{kind}".replace("post_norm.", "final_layernorm.")
        return [(f"model.mtp_layers.0.{own}", tensor)]
    prefix = f"model.layers.{layers}."
    own = own.replace("post_norm.", "shared_head.norm.")
    if ".experts." not in own:
        return [(f"{prefix}{own}", tensor)]
    projections = ("gate_proj", "up_proj") if own.endswith("gate_up_proj") else ("down_proj",)
    return [
        (f"{prefix}mlp.experts.{expert}.{projection}.weight", part)
        for expert, weight in enumerate(tensor)
        for projection, part in zip(projections, weight.chunk(len(projections)), strict=True)
    ]


def save_target(
    family: str, directory: Path, *, block: bool = True, blocks: int = 1
) -> tuple[PreTrainedModel, MtpModel]:
    """Save a sharp target with a prediction block, and return both as transformers has them.

    Args:
        block: false for a checkpoint whose block was left out.
        blocks: how many the configuration states.
    """
    dense = family == "mimo"
    model = sharpen(tiny_models.build("qwen-1.5" if dense else family))
    config = model.config
    config.num_mtp_layers, config.mtp_hidden_states_first = 1, dense
    if dense:
        config.mtp_layer_types = ["full_attention"]
    torch.manual_seed(1)
    own = MtpModel(model, 1).float().eval()
    own.config._attn_implementation = "eager"
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        tensors = {
            **dict(own.layers.named_parameters(prefix="layers")),
            **dict(own.layers.named_buffers(prefix="layers")),
        }
        for name, tensor in tensors.items():
            if tensor.dim() == 1:
                tensor.normal_(float("norm" in name), tiny_models.WIDTH)
            else:
                tensor.normal_(0, tiny_models.WIDTH)
            stored |= {
                own_name: each.contiguous()
                for own_name, each in _stored(name, tensor, family, config.num_hidden_layers)
            }
    model.save_pretrained(directory)
    speak(directory)
    _state(directory, dense, blocks)
    if block:
        copies = (
            {} if dense else {f"model.layers.{config.num_hidden_layers}.shared_head.head.weight": model.lm_head.weight}
        )
        copied = {name: tensor.detach().clone() for name, tensor in copies.items()}
        save_file(load_file(directory / "model.safetensors") | stored | copied, directory / "model.safetensors")
    return model, own


def write_file(family: str, file: Path, kind: str = "F32") -> tuple[PreTrainedModel, MtpModel]:
    """Write a GGUF file of a target whose last layer is its prediction block, as llama.cpp's converter does."""
    from gguf import GGMLQuantizationType, GGUFWriter

    from gguf_makers import UNSTATED, write_gguf

    model = sharpen(tiny_models.build(family, **{**UNSTATED.get(family, {}), "num_hidden_layers": 4}))
    *layers, last = model.model.layers
    generator = torch.Generator().manual_seed(2)
    sizes = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head_norm": (64,)}
    parts = {name: torch.randn(size, generator=generator) * tiny_models.WIDTH for name, size in sizes.items()}
    parts |= {name: 1 + part for name, part in parts.items() if part.dim() == 1}

    def add(writer: GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        for name, part in parts.items():
            writer.add_tensor(f"blk.3.nextn.{name}.weight", part.numpy())

    write_gguf(file, model, lambda name: GGMLQuantizationType[kind], metadata=add)
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers, model.config.num_mtp_layers = 3, 1
    own = MtpModel(model, 1).float().eval()
    own.config._attn_implementation = "eager"
    block = own.layers[0]
    block.mtp_block.load_state_dict(last.state_dict())
    with torch.no_grad():
        for name, part in parts.items():
            block.get_submodule(name.replace("shared_head_norm", "post_norm")).weight.copy_(part)
    return model, own


def _state(directory: Path, dense: bool, blocks: int) -> None:
    """Write the number of blocks, and the name of a family that transformers lacks."""
    import json

    file = directory / "config.json"
    config = json.loads(file.read_text())
    config = {key: value for key, value in config.items() if not key.startswith(("mtp_", "num_mtp"))}
    config["num_nextn_predict_layers"] = blocks
    if dense:
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    file.write_text(json.dumps(config))


def chain_of(
    model: PreTrainedModel, own: MtpModel, text: Sequence[int], path: Sequence[int], *, normed: bool = True
) -> list[Tensor]:
    """Logits [V] of the block after a certain text, whose last token is pending, and after each token of a path.

    Args:
        normed: the next step reads the state after the block's last norm.
    """
    seen: list[Tensor] = []
    handle = own.layers[0].post_norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    found = []
    with torch.no_grad():
        hidden = model.get_decoder()(torch.tensor([list(text[:-1])])).last_hidden_state
        for depth in range(len(path) + 1):
            tokens = torch.tensor([[*text[1:], *path[:depth]]])
            places = torch.arange(1, tokens.shape[1] + 1)[None]
            output = own.forward_layer(0, hidden, places, None, input_ids=tokens)
            found.append(own._project_to_logits(output[0, -1]))
            hidden = torch.cat([hidden, (output if normed else seen[-1])[:, -1:]], dim=1)
    handle.remove()
    return found
