"""Files of heads that are damaged, contradict themselves or belong elsewhere: an error that says what and where."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from head_files import TARGET, VOCAB, eagle_1, eagle_3, medusa, random_head, write_files
from producers import BASE, IDS, SAFEAILAB, SPECFORGE, SPECULATORS, read, tensors_of, without
from sametoken.errors import CheckpointError, DraftMismatchError, SametokenError, UnsupportedModelError
from sametoken.heads.medusa.names import medusa_tensors
from sametoken.heads.read import is_head
from sametoken.model.config import ModelConfig


def refused(place: Path, kind: type[SametokenError], target: ModelConfig = TARGET) -> str:
    with pytest.raises(SametokenError) as caught:
        read(place, target)
    assert type(caught.value) is kind, caught.value
    assert str(place) in str(caught.value)
    return str(caught.value)


def changed_maps(head: Any, **maps: Tensor) -> dict[str, Tensor]:
    return {**tensors_of(head), **maps}


def test_eagle_1_called_eagle_3_and_the_reverse(tmp_path: Path) -> None:
    first, third = random_head(eagle_1()), random_head(eagle_3(draft_vocab_size=VOCAB))
    for config in (SAFEAILAB, SPECFORGE, {**BASE, "sametoken": {"version": 3}}):
        message = refused(write_files(tmp_path, config, tensors_of(first)), DraftMismatchError)
        assert "declares EAGLE-3" in message
        assert "no hidden_norm" in message
    for names in (["EagleLlamaForCausalLM"], ["LlamaForCausalLMEagle"]):
        place = write_files(tmp_path, {**BASE, "architectures": names}, tensors_of(third))
        message = refused(place, DraftMismatchError)
        assert "declares EAGLE-1" in message
        assert "serve the head as EAGLE-3" in message


@pytest.mark.parametrize(
    ("target", "got", "expected"),
    [
        (replace(TARGET, vocab_size=99), "40", "99"),
        (replace(TARGET, hidden_size=24), "16", "24"),
        (replace(TARGET, num_layers=4), "outputs|layer", "0 to 3"),
    ],
)
def test_another_target(target: ModelConfig, got: str, expected: str, tmp_path: Path) -> None:
    head = random_head(eagle_3())
    place = write_files(tmp_path, {**SPECFORGE, "eagle_config": {IDS: [1, 3, 5]}}, tensors_of(head))
    message = refused(place, DraftMismatchError, target)
    assert expected in message
    assert any(word in message for word in got.split("|"))


def test_medusa_for_another_target(tmp_path: Path) -> None:
    head = random_head(medusa())
    place = write_files(tmp_path, {"medusa_num_heads": 3}, dict(medusa_tensors(head, head.config)))
    assert "hidden size of 16, the target's is 32" in refused(
        place, DraftMismatchError, replace(TARGET, hidden_size=32)
    )
    assert "vocabulary of 40, the target's is 50" in refused(place, DraftMismatchError, replace(TARGET, vocab_size=50))


def test_maps_of_the_vocabulary(tmp_path: Path) -> None:
    head = random_head(eagle_3())
    ids = head.draft_ids
    t2d = tensors_of(head)["t2d"]
    cases: list[tuple[dict[str, Tensor], type[SametokenError], str]] = [
        (without(tensors_of(head), "d2t"), CheckpointError, "no d2t"),
        (changed_maps(head, d2t=head.d2t[:-1]), CheckpointError, "11 entries, expected 12"),
        (changed_maps(head, d2t=head.d2t.float()), CheckpointError, r"torch.float32"),
        (changed_maps(head, d2t=head.d2t[None]), CheckpointError, r"shape [1, 12]"),
        (changed_maps(head, d2t=head.d2t + VOCAB), DraftMismatchError, "the target's vocabulary has 40"),
        (changed_maps(head, d2t=head.d2t - VOCAB), DraftMismatchError, "the target's vocabulary has 40"),
        (changed_maps(head, d2t=ids), DraftMismatchError, "these may be ids"),
        (changed_maps(head, d2t=-torch.arange(12)), CheckpointError, "1 different tokens, expected 12"),
        (changed_maps(head, t2d=~t2d), CheckpointError, "disagree about 40 tokens"),
        (changed_maps(head, t2d=t2d[:-1]), DraftMismatchError, "t2d has 39 entries"),
    ]
    for number, (found, kind, words) in enumerate(cases):
        place = write_files(tmp_path / str(number), SPECFORGE, found)
        assert words in refused(place, kind), number


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**SPECFORGE, "fc_norm": True}, "fc_norm = true, but fc_norm.0.weight is missing"),
        ({**SPECFORGE, "norm_before_fc": True}, "norm_before_fc = true"),
        ({**SPECFORGE, "attention_bias": True}, "layers.0.self_attn.q_proj.bias, which is missing"),
        (
            {**SPECFORGE, "norm_output": True, "eagle_config": {IDS: [1, 3, 4], "norm_output": False}},
            "both true and false",
        ),
        ({**SPECFORGE, "norm_output": "yes"}, "'yes'"),
        ({**SPECFORGE, "eagle_config": {IDS: [1, 3]}}, "names 2 layers [1, 3], fc reads 3"),
        ({**SPECFORGE, "eagle_config": {IDS: "1,3,4"}}, "expected a list of layers"),
        ({**SPECFORGE, "eagle_config": {IDS: [3, 3, 4]}}, "different layers"),
        ({**SPECFORGE, "layer_types": ["sliding_attention"]}, "'sliding_window'"),
        ({**SPECFORGE, "draft_vocab_size": 13}, "lm_head.weight has shape [12, 16], expected [13, 16]"),
        ({**SPECFORGE, "draft_vocab_size": "many"}, "'many'"),
        (without(SPECFORGE, "intermediate_size"), "'intermediate_size'"),
        ({**SPECFORGE, "intermediate_size": 24}, "down_proj.weight has shape [16, 20], expected [16, 24]"),
        ({**SPECFORGE, "num_hidden_layers": 2}, "missing: layers.1.input_layernorm.weight"),
    ],
)
def test_config_and_weights_that_contradict_each_other(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    place = write_files(tmp_path, config, tensors_of(random_head(eagle_3())))
    with pytest.raises(CheckpointError) as caught:
        read(place)
    assert words in str(caught.value)


@pytest.mark.parametrize("lost", ["norm.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.k_proj.weight"])
def test_missing_weights_are_named(lost: str, tmp_path: Path) -> None:
    place = write_files(tmp_path, SPECFORGE, without(tensors_of(random_head(eagle_3())), lost))
    with pytest.raises(CheckpointError, match=f"1 missing: {lost}"):
        read(place)


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        ({**SPECULATORS, "speculators_model_type": "dflash"}, {}, "dflash"),
        (SPECULATORS, {"mask_hidden": torch.zeros(1, 1, 3)}, "P-EAGLE"),
        ({**SPECFORGE, "quantization_config": {"quant_method": "bitsandbytes"}}, {}, "quantised"),
        (
            {**SPECFORGE, "eagle_config": {IDS: [1, 3, 4], "next_layer_regular": False}, "num_hidden_layers": 2},
            {},
            "next_layer",
        ),
    ],
)
def test_kinds_that_are_not_implemented(
    config: dict[str, Any], more: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    place = write_files(tmp_path, config, tensors_of(random_head(eagle_3())) | more)
    assert words in refused(place, UnsupportedModelError)


def test_a_training_checkpoint_with_the_whole_model(tmp_path: Path) -> None:
    found = {f"eagle_module.{name}": tensor for name, tensor in tensors_of(random_head(eagle_3())).items()}
    place = write_files(tmp_path, BASE, {**found, "model.norm.weight": torch.ones(16)})
    assert is_head(place)
    assert "export the head there" in refused(place, UnsupportedModelError)


def test_medusa_that_contradicts_itself(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2))
    found = dict(medusa_tensors(head, head.config))
    assert "5, but the weights have 3 heads" in refused(
        write_files(tmp_path / "a", {"medusa_num_heads": 5}, found), CheckpointError
    )
    assert "1, but the weights have 2 layers" in refused(
        write_files(tmp_path / "b", {"medusa_num_layers": 1}, found), CheckpointError
    )
    place = write_files(tmp_path / "c", {"medusa_num_heads": 3}, without(found, "1.0.linear.bias"))
    with pytest.raises(CheckpointError, match=r"1 missing: 1\.0\.linear\.bias"):
        read(place)
    for number, choices in enumerate(([[0, 0]], "none", [[0], [-1]], [[0] * 4])):
        place = write_files(tmp_path / f"d{number}", {"medusa_choices": choices}, found)
        assert "medusa_choices" in refused(place, CheckpointError)
    place = write_files(tmp_path / "e", {"truncated_vocab_size": 7}, found)
    assert "truncated vocabulary" in refused(place, UnsupportedModelError)


@pytest.mark.parametrize("name", ["99999999.0.linear.weight", "0.99999999.linear.weight", f"{'9' * 5000}.0.bias"])
def test_medusa_heads_of_absurd_numbers(name: str, tmp_path: Path) -> None:
    head = random_head(medusa())
    place = write_files(tmp_path, {}, {**dict(medusa_tensors(head, head.config)), name: torch.ones(16, 16)})
    start = time.process_time()
    with contextlib.suppress(SametokenError):  # a number that is no index names no part of a head
        read(place)
    assert time.process_time() - start < 2


def test_files_that_are_no_head(tmp_path: Path, tiny_llm_dir: Path) -> None:
    assert not is_head(tiny_llm_dir)
    assert not is_head(tmp_path)
    assert "no config.json" in refused(tmp_path, CheckpointError)
    place = write_files(tmp_path / "other", BASE, {"linear.weight": torch.ones(2, 2)})
    assert not is_head(place)
    assert "no tensors of a known head (EAGLE-1, EAGLE-3 or Medusa), found" in refused(place, CheckpointError)
    (place / "model.safetensors").write_bytes(b"torn")
    assert not is_head(place)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read(place)
