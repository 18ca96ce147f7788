"""Heads as other trainers write them: the same module comes out, with the right layers, and what was assumed is said.

The files are spelled here as each trainer spells them (names, keys, file types), from one random head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from head_files import HIDDEN, LAYERS, VOCAB, eagle_1, eagle_3, layers, medusa, outputs, random_head, write_files
from producers import BASE, IDS, MODELOPT, SAFEAILAB, SPECFORGE, SPECULATORS, midlayer, read, tensors_of, without
from sametoken.heads.medusa.names import medusa_tensors
from sametoken.heads.read import LoadedHead, is_head


def check_same(loaded: LoadedHead, head: Any) -> None:
    assert loaded.config == head.config
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, head.get_parameter(name)), name
    assert torch.equal(outputs(loaded.module), outputs(head))


def test_safeailab_pickled_with_everyones_layers(tmp_path: Path) -> None:
    head = random_head(eagle_3())
    place = write_files(tmp_path, SAFEAILAB, midlayer(tensors_of(head)), "pytorch_model.bin")
    assert is_head(place)
    loaded = read(place)
    check_same(loaded, head)
    assert loaded.notes == ("no rope_theta in config.json: 10000 (the target's own is 500000)",)


def test_layers_that_were_copied_from_the_target(tmp_path: Path) -> None:
    head = random_head(eagle_3())
    config = {**SAFEAILAB, "num_hidden_layers": 40, "rope_theta": 10000.0}
    loaded = read(write_files(tmp_path, config, midlayer(tensors_of(head))))
    check_same(loaded, head)
    assert loaded.notes == ("config.json has 40 layers, the weights have one, which is used",)


@pytest.mark.parametrize("config", [SPECFORGE, MODELOPT])
@pytest.mark.parametrize("spell", [midlayer, dict])
@pytest.mark.parametrize("maps", [("t2d",), ()])
def test_specforge_and_modelopt(
    config: dict[str, Any],
    spell: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    maps: tuple[str, ...],
    tmp_path: Path,
) -> None:
    head = random_head(eagle_3())
    check_same(read(write_files(tmp_path, config, without(spell(tensors_of(head)), *maps))), head)


def test_modelopt_says_what_it_wrote_at_export(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 48}
    config = {**MODELOPT, "rope_scaling": yarn}
    loaded = read(write_files(tmp_path, config, tensors_of(random_head(eagle_3()))))
    assert loaded.config.layers.rope.kind == "yarn"
    assert loaded.notes == ("ModelOpt writes YaRN scaling at export, whatever the head was trained with",)


def test_speculators_with_token_vectors_and_every_norm(tmp_path: Path) -> None:
    head = random_head(
        eagle_3(own_embed=True, fc_norm=True, norm_output=True, norm_before_residual=True, taps=(0, 2, 6))
    )
    config = {**SPECULATORS, "fc_norm": True, "norm_output": True, IDS: [1, 3, 7]}
    verifier = {"verifier_lm_head.weight": torch.randn(2, 2), "verifier_norm.weight": torch.randn(2)}
    loaded = read(write_files(tmp_path, config, tensors_of(head) | verifier))
    check_same(loaded, head)
    assert loaded.notes == ()


def test_speculators_lists_the_last_state_too(tmp_path: Path) -> None:
    head = random_head(eagle_3(norm_before_residual=True))
    check_same(read(write_files(tmp_path, {**SPECULATORS, IDS: [2, 4, 5, LAYERS]}, tensors_of(head))), head)


def test_speculators_qwen3_blocks_and_windows(tmp_path: Path) -> None:
    blocks = layers(2, qk_norm=True, sliding_windows=(7, 7))
    head = random_head(eagle_3(layers=blocks, norm_before_residual=True))
    inner = {
        **BASE, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 4,
        "rope_parameters": {"rope_theta": 10000.0},
        "sliding_window": 7, "layer_types": ["sliding_attention"] * 2,
    }  # fmt: skip
    check_same(read(write_files(tmp_path, {**SPECULATORS, "transformer_layer_config": inner}, tensors_of(head))), head)


def test_sglang_names_of_the_norms(tmp_path: Path) -> None:
    head = random_head(eagle_3(fc_norm=True))
    found = midlayer(tensors_of(head))
    for i, name in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        found[f"{name}.weight"] = found.pop(f"fc_norm.{i}.weight")
    check_same(read(write_files(tmp_path, {**SPECFORGE, "rope_theta": 10000.0}, found)), head)


def test_specforge_norm_output_is_not_what_engines_do(tmp_path: Path) -> None:
    found = midlayer(tensors_of(random_head(eagle_3())))
    loaded = read(write_files(tmp_path, {**SPECFORGE, "norm_output": True, "rope_theta": 1e4}, found))
    assert "without feeding the normed state back" in loaded.notes[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle_1_with_and_without_bias(bias: bool, prefix: str, tmp_path: Path) -> None:
    head = random_head(eagle_1(fc_bias=bias))
    config = {**BASE, "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
    found = {prefix + name: tensor for name, tensor in tensors_of(head).items()}
    for stated in ({}, {"bias": bias}):
        place = write_files(tmp_path, {**config, **stated}, found, "pytorch_model.bin")
        assert is_head(place)
        check_same(read(place), head)


def test_eagle_1_of_a_qwen2_target_with_several_blocks(tmp_path: Path) -> None:
    head = random_head(eagle_1(layers=layers(2, qkv_bias=True), own_embed=True))
    config = {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 2}
    check_same(read(write_files(tmp_path, {**config, "rope_theta": 10000.0}, tensors_of(head))), head)


def test_eagle_1_of_modelopt_with_norms(tmp_path: Path) -> None:
    head = random_head(eagle_1(fc_bias=False, input_norm=True, last_norm=True, own_head=True))
    flags = {"use_aux_hidden_state": False, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    config = {**BASE, "architectures": ["LlamaForCausalLMEagle"], "eagle_config": flags, "rope_theta": 10000.0}
    check_same(read(write_files(tmp_path, config, tensors_of(head))), head)


# Layers


@pytest.mark.parametrize(
    ("stated", "taps", "known"),
    [
        ({}, (1, 3, 4), True),
        ({"eagle_config": {IDS: [1, 3, 4]}}, (1, 3, 4), True),  # fits no other reading
        ({"eagle_config": {IDS: [2, 3, 6]}}, (2, 3, 6), False),
        ({"eagle_config": {IDS: [0, 3, 6]}}, (0, 3, 6), True),
        ({"eagle_config": {IDS: [2, 6, 8]}}, (1, 5, 7), True),  # no block has the index 8
        ({IDS: [2, 4, 5]}, (1, 3, 4), False),
        ({IDS: [0, 4, 5]}, (0, 4, 5), True),
        ({IDS: [3, 4, 8], "eagle_config": {IDS: [2, 3, 7]}}, (2, 3, 7), True),
        ({IDS: [3, 4, 6], "eagle_config": {IDS: [3, 4, 6]}}, (2, 3, 5), False),
        ({IDS: [2, 4, 5], "speculators_config": {}}, (1, 3, 4), True),
        ({"sametoken": {"taps": [2, 5, 7]}, IDS: [1, 1, 1]}, (2, 5, 7), True),
    ],
)
def test_conventions_of_layer_ids(stated: dict[str, Any], taps: tuple[int, ...], known: bool, tmp_path: Path) -> None:
    config = {**SAFEAILAB, "rope_theta": 10000.0, "norm_before_residual": False, **stated}
    loaded = read(write_files(tmp_path, config, tensors_of(random_head(eagle_3()))))
    assert loaded.config.taps == taps
    assert bool(loaded.notes) != known
    assert known or f"taps {list(taps)}" in loaded.notes[0]


# Medusa


def test_fasterdecoding_in_both_files_and_both_depths(tmp_path: Path) -> None:
    for file in ("medusa_lm_head.pt", "medusa_lm_head.safetensors"):
        for own, depth in ((True, 1), (False, 2), (True, 2)):
            head = random_head(medusa(num_layers=depth, own_heads=own))
            config = {"medusa_num_heads": 3, "medusa_num_layers": depth, "base_model_name_or_path": "x", "version": "2"}
            place = write_files(
                tmp_path / f"{file}-{own}-{depth}", config, dict(medusa_tensors(head, head.config)), file
            )
            assert is_head(place)
            check_same(read(place), head)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_medusa(bias: bool, prefix: str, tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2))
    found = {}
    for i, part in enumerate(head.heads):
        found[f"{prefix}lm_heads.{i}.weight"] = part.head.weight.data
        for j, block in enumerate(part.blocks):
            found[f"{prefix}blocks.{i}.layers.{j}.weight"] = block.linear.weight.data
            if bias:
                found[f"{prefix}blocks.{i}.layers.{j}.bias"] = block.linear.bias.data
            else:
                block.linear.bias.data.zero_()
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": bias, "truncated_vocab_size": VOCAB,
    }  # fmt: skip
    check_same(read(write_files(tmp_path, config, found)), head)


def test_vllm_medusa_with_a_copy_of_the_targets_output_layer(tmp_path: Path) -> None:
    head = random_head(medusa(own_heads=False))
    found = {f"blocks.{i}.layers.0.{kind}": getattr(part.blocks[0].linear, kind).data
             for i, part in enumerate(head.heads) for kind in ("weight", "bias")}  # fmt: skip
    found["lm_heads.0.weight"] = torch.randn(VOCAB, HIDDEN)
    config = {"architectures": ["MedusaModel"], "num_heads": 3, "num_hidden_layers": 1, "original_lm_head": True}
    check_same(read(write_files(tmp_path, {**config, "medusa_fc_bias": True}, found)), head)


def test_modelopt_medusa_inside_a_whole_model(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2))
    found = {f"medusa_heads.{name}": tensor for name, tensor in medusa_tensors(head, head.config)}
    found |= {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "model.norm.weight": torch.randn(HIDDEN)}
    inner = {"num_medusa_heads": 3, "num_medusa_layers": 2}
    config = {**BASE, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
    place = write_files(tmp_path, config, found)
    assert is_head(place)
    check_same(read(place), head)
    loaded = read(write_files(tmp_path, {**config, "medusa": inner}, found))
    assert "ModelOpt trains head i" in loaded.notes[0]
