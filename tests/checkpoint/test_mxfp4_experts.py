"""gpt-oss as it is published, with experts in MXFP4: what is read, computed and refused.

The oracle is transformers: its dequantiser of the same tensors, and its model with those numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantised import logits
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import tiny_models
from cli_checks import speak
from quantised_makers import MADE
from sametoken import LLM, SamplingParams
from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.load import decoder_weights, load_decoder
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import read_tensors
from sametoken.errors import CheckpointError, ConfigError
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Coded

PLAIN_MODULES = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN_MODULES}
PROMPTS = ["abcabcabc", "the cat and the cat", "zzyyxx"]
Change = Callable[[dict[str, Tensor]], None]


def rewritten(source: Path, target: Path, tensors: dict[str, Tensor], stated: object) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, target)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target / "model.safetensors")
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": stated}))
    return target


def packed(weight: Tensor) -> dict[str, Tensor]:
    """Blocks and scales of the experts' weight [experts, in, out], as gpt-oss's files have them."""
    made = [MADE["mxfp4"].make(each.t().contiguous())[0] for each in weight]
    codes = torch.stack([parts["weight_packed"] for parts in made])
    return {"blocks": codes.unflatten(2, (-1, 16)), "scales": torch.stack([parts["weight_scale"] for parts in made])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny gpt-oss with experts in MXFP4, and the same one with the numbers that transformers reads there."""
    root = tmp_path_factory.mktemp("gpt-oss")
    tiny_models.save("gpt-oss", root / "source")
    speak(root / "source")
    stored, meant = {}, {}
    for name, tensor in load_file(root / "source" / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = packed(tensor)
            stored |= {f"{name}_{kind}": part for kind, part in parts.items()}
            meant[name] = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)
        else:
            stored[name] = meant[name] = tensor
    return (
        rewritten(root / "source", root / "packed", stored, STATED),
        rewritten(root / "source", root / "plain", meant, None),
    )


def experts_of(directory: Path) -> dict[str, Tensor | Coded]:
    """Every expert's weights by their names, from tensors in the reverse order of the file: scales before blocks."""
    config = ModelConfig.from_hf(read_config(directory))
    stored = [Item(*item) for item in read_tensors(directory)][::-1]
    found = single_experts(stored, config, stored_scheme(directory))
    return {item.name: item.tensor for item in found if ".experts." in item.name}


def test_every_code_and_scale_is_what_transformers_reads(folders: tuple[Path, Path], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    stored = load_file(folders[0] / "model.safetensors")
    meant = load_file(folders[1] / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        for kind, highest in (("blocks", 256), ("scales", 255)):  # 255 is NaN
            tensor = stored[f"{name}_{kind}"]
            stored[f"{name}_{kind}"] = torch.randint(0, highest, tensor.shape, generator=generator, dtype=torch.uint8)
        meant[name] = convert_moe_packed_tensors(
            stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32
        )
    found = experts_of(rewritten(folders[0], tmp_path / "packed", stored, STATED))
    expected = experts_of(rewritten(folders[1], tmp_path / "plain", meant, None))
    assert found.keys() == expected.keys()
    weights = {name: weight for name, weight in found.items() if isinstance(weight, Coded)}
    assert len(weights) == 3 * 6 * 2
    for name, weight in weights.items():
        theirs = expected[name]
        assert isinstance(theirs, Tensor)
        assert torch.equal(weight.dequantize(), theirs)


@torch.inference_mode()
def test_logits_are_those_of_the_model_with_dequantised_weights(folders: tuple[Path, Path]) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, tiny_models.VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    expected = oracle(tokens.unsqueeze(0)).logits[0]
    exact = logits(load_decoder(folders[0], torch.float32, "cpu"), tokens, (40,))
    assert (exact - expected).norm() <= 1e-5 * expected.norm()
    decoder = load_decoder(folders[0], torch.bfloat16, "cpu")
    whole = logits(decoder, tokens, (40,))
    assert torch.equal(whole, logits(decoder, tokens, (2, 3, 5, 8, 9, 13)))
    plain = logits(load_decoder(folders[1], torch.bfloat16, "cpu"), tokens, (40,)).float()
    assert (whole.float() - plain).norm() <= 0.02 * plain.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_stay_packed_in_memory(dtype: torch.dtype, folders: tuple[Path, Path]) -> None:
    for block in load_decoder(folders[0], dtype, "cpu").blocks:
        assert block.experts is not None
        for expert in block.experts.each:
            for linear in (expert.gate_up, expert.down):
                held = linear.coded.nbytes if linear.native is None else linear.native.nbytes
                inputs = -(-linear.in_features // 128) * 128  # the compiled kernels' layout is padded
                assert held <= inputs * linear.out_features * 0.6  # 4.25 bits, and the bias


def test_drafts_change_no_token(folders: tuple[Path, Path]) -> None:
    settings = [SamplingParams(max_tokens=24, temperature=t, seed=7) for t in (0.0, 0.8)]

    def written(method: str, draft: Path | None) -> list[list[int]]:
        llm = LLM(str(folders[0]), draft and str(draft), speculative={"method": method})
        replies = [reply for setting in settings for reply in llm.generate(PROMPTS, setting)]
        return [list(reply.token_ids) for reply in replies]

    expected = written("none", None)
    assert written("ngram", None) == expected
    assert written("draft_target", folders[1]) == expected  # the same numbers: most of its tokens are accepted
    assert written("draft_target", folders[0]) == expected


def test_training_reads_the_numbers_that_the_experts_mean(folders: tuple[Path, Path]) -> None:
    def read(folder: Path) -> dict[str, Tensor]:
        config = ModelConfig.from_hf(read_config(folder))
        with torch.device("meta"):
            decoder = Decoder(config, torch.float32)
        weights = decoder_weights(folder, config)
        load_parameters(decoder, weights, rules_for(config), torch.float32, torch.device("cpu"), pack=False)
        return decoder.state_dict()

    found, expected = map(read, folders)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_quantising_twice_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"quantised already \(MXFP4\); leave it out"):
        load_decoder(folders[0], torch.bfloat16, "cpu", quantization="int8")


NAME = "model.layers.1.mlp.experts.gate_up_proj"
BLOCKS, SCALES = f"{NAME}_blocks", f"{NAME}_scales"


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def without(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def nan(scales: Tensor) -> Tensor:
    return scales.index_put((torch.tensor(3), torch.tensor(5), torch.tensor(1)), torch.tensor(255, dtype=torch.uint8))


BAD: list[tuple[Change, str]] = [
    (without(SCALES), f"{BLOCKS} is there, but no {SCALES}; the file is damaged"),
    (without(BLOCKS), f"{SCALES} is there, but no {BLOCKS}; the file is damaged"),
    (put(BLOCKS, lambda x: x[..., :15]), f"{BLOCKS} is uint8 [6, 192, 2, 15], expected uint8 [experts, outputs, gro"),
    (put(BLOCKS, lambda x: x.flatten(2)), f"{BLOCKS} is uint8 [6, 192, 32], expected uint8 [experts, outputs, groups"),
    (put(BLOCKS, lambda x: x.float()), f"{BLOCKS} is float32 [6, 192, 2, 16], expected uint8"),
    (put(BLOCKS, lambda x: x[:, :190]), f"{SCALES} is uint8 [6, 192, 2], expected uint8 [6, 190, 2]"),
    (put(SCALES, lambda x: x[..., :1]), f"{SCALES} is uint8 [6, 192, 1], expected uint8 [6, 192, 2]"),
    (put(SCALES, lambda x: x.to(torch.int32)), f"{SCALES} is int32 [6, 192, 2], expected uint8 [6, 192, 2]"),
    (put(SCALES, nan), f"{BLOCKS}, expert 3: its scales lie between nan and nan, expected positive finite numbers"),
    (
        lambda tensors: tensors.update({name: tensors[name][:5] for name in (BLOCKS, SCALES)}),
        f"{BLOCKS} has shape [5, 192, 2, 16], expected 6 experts",
    ),
    (
        lambda tensors: tensors.update({name: tensors[name][:, :190] for name in (BLOCKS, SCALES)}),
        "experts.0.gate_up_proj.weight has shape [190, 64], expected [192, 64]",
    ),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words[:60] for _, words in BAD])
def test_damaged_blocks_and_scales_are_named(
    change: Change, words: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    change(tensors)
    directory = rewritten(folders[0], tmp_path / "bad", tensors, STATED)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(directory, torch.bfloat16, "cpu")
    message = str(caught.value)
    assert words in message
    assert str(directory) in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("stated", [None, {**STATED, "modules_to_not_convert": ["model.layers.*.mlp.experts.*"]}])
def test_blocks_that_the_configuration_does_not_state_are_unexpected(
    stated: object, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: .*gate_up_proj_blocks"):
        load_decoder(rewritten(folders[0], tmp_path / "other", tensors, stated), torch.bfloat16, "cpu")
