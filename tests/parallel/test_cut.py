"""Parts of a decoder together compute what the whole one does, for each family and each format of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_threads import at_once, last_states, load_parts
from torch import Tensor

import tiny_models
from quantised_makers import MADE, quantised
from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.memory import times_held
from sametoken.errors import ConfigError, UnsupportedModelError
from sametoken.kernels.cpu.variant import library
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Code, Coded
from sametoken.model.linear import Linear
from sametoken.runtime.ranks import Columns, RankPart

TOKENS = [5, 17, 99, 3, 42, 64, 101, 7, 23, 88, 12]
REFUSED = {"olmo-2": UnsupportedModelError, "olmo-3": UnsupportedModelError, "tinyllama": ConfigError}
REFUSED |= {name: UnsupportedModelError for name in tiny_models.FAMILIES if name.startswith("deepseek")}


def compare(directory: Path, dtype: torch.dtype, tolerance: float, quantization: str = "none", size: int = 2) -> None:
    """The hidden states of the parts are the same for all ranks and near those of the whole."""
    whole = load_decoder(directory, dtype, "cpu", 96, quantization)
    parts = load_parts(directory, size, dtype, quantization)
    expected = last_states(whole, [TOKENS]).float()
    found = at_once([lambda part=part: last_states(part, [TOKENS]) for part in parts])
    assert all(torch.equal(each, found[0]) for each in found)
    errors = (found[0].float() - expected).abs().amax(-1).flatten() / expected.abs().max()
    # Rounding may make a token choose another of two experts with almost the same score.
    sure = len(TOKENS) - (whole.config.experts is not None and dtype == torch.bfloat16)
    assert (errors < tolerance).sum() >= sure, errors
    cut_rows = at_once(
        [lambda part=part: last_states(part, [TOKENS[:4], *([t] for t in TOKENS[4:])]) for part in parts]
    )
    assert torch.equal(cut_rows[0], found[0]), "a token's bits depend on what is computed beside it"
    assert sum(map(matrix_sizes, parts)) < 1.2 * matrix_sizes(whole)
    compare_logits(whole, parts, found[0])


def compare_logits(whole: Decoder, parts: Sequence[Decoder], states: Tensor) -> None:
    """The logits of the parts, side by side, are those of the whole; bit for bit where no torch product is between."""
    expected, found = whole.logits(states), at_once([lambda part=part: part.logits(states) for part in parts])[0]
    near = 1e-5 if found.dtype == torch.float32 else 0.02 * expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.0, atol=near)
    assert None in (whole.native, parts[0].native) or torch.equal(found, expected)


def matrix_sizes(decoder: Decoder) -> int:
    """Numbers in the matrices of the blocks."""
    linears = [module for module in decoder.blocks.modules() if isinstance(module, Linear)]
    return sum(linear.in_features * linear.out_features for linear in linears)


@pytest.mark.parametrize("name", sorted(set(tiny_models.FAMILIES) - set(REFUSED)))
def test_parts_of_each_family_together_are_the_whole(name: str, tmp_path: Path) -> None:
    tiny_models.save(name, tmp_path)
    compare(tmp_path, torch.float32, 1e-4)


def test_how_often_ranks_hold_a_target_is_what_they_load(tmp_path: Path) -> None:
    """Each has the token vectors, so that two hold more than the whole."""

    def numbers(decoder: Decoder) -> int:
        linears = [module for module in decoder.modules() if isinstance(module, Linear)]
        vectors = sum(tensor.numel() for tensor in decoder.parameters())
        return vectors + sum(linear.in_features * linear.out_features for linear in linears)

    tiny_models.save("llama-3", tmp_path)
    held = sum(map(numbers, load_parts(tmp_path, 2, torch.float32, "none")))
    share = held / numbers(load_decoder(tmp_path, torch.float32, "cpu", 96))
    stated = ModelConfig.from_hf(read_config(tmp_path))
    assert times_held(stated, 2) == pytest.approx(share, rel=0.02)
    assert share > 1.05
    assert times_held(stated, 1) == 1


@pytest.mark.parametrize("name", ["llama-biases", "gemma-2", "qwen-3-moe", "granite-3", "gpt-oss"])
def test_parts_in_bfloat16_keep_a_rows_bits(name: str, tmp_path: Path) -> None:
    tiny_models.save(name, tmp_path)
    compare(tmp_path, torch.bfloat16, 0.05)


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels here")
@pytest.mark.parametrize("name", ["qwen-3-moe", "glm-4.5-moe", "gpt-oss"])
def test_parts_of_experts_are_compiled(name: str, tmp_path: Path) -> None:
    """With experts as wide as vectors, which the tiny ones are not."""
    wide = "intermediate_size" if name == "gpt-oss" else "moe_intermediate_size"
    tiny_models.build(name, **{wide: 64}).save_pretrained(tmp_path)
    assert load_decoder(tmp_path, torch.bfloat16, "cpu", 96, part=RankPart(0, 2)).native is not None
    compare(tmp_path, torch.bfloat16, 0.05)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_cut_is_refused(name: str, tmp_path: Path) -> None:
    tiny_models.save(name, tmp_path)
    with pytest.raises(REFUSED[name], match=r"tensor_parallel_size 2.*use"):
        load_decoder(tmp_path, torch.float32, "cpu", 96, part=RankPart(0, 2))


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(tmp_path: Path) -> None:
    tiny_models.save("llama-3", tmp_path)
    config = replace(ModelConfig.from_hf(read_config(tmp_path)), num_heads=12, num_kv_heads=6, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"heads 12 and .*_value_heads 6 and .*; use one of 1, 2, 3, 6$"):
        cut(config, RankPart(0, 5))
    assert cut(config, RankPart(2, 3)).num_kv_heads == 2


@pytest.mark.parametrize("name", sorted(MADE))
def test_parts_of_each_format_of_other_tools(name: str, tmp_path: Path) -> None:
    tiny_models.build("llama-3", hidden_size=256, intermediate_size=256).save_pretrained(tmp_path / "plain")
    directory = quantised(tmp_path / "plain", name, tmp_path / "made")
    if name.endswith("order"):
        with pytest.raises(UnsupportedModelError, match=r"g_idx.*use 1"):
            load_decoder(directory, torch.float32, "cpu", 96, part=RankPart(0, 2))
        return
    rounds_rows = name == "w8a8"  # by the greatest number of a rank's own part
    compare(directory, torch.float32, 0.15 if rounds_rows else 1e-4)
    compare(directory, torch.bfloat16, 0.15 if rounds_rows else 0.05)


@pytest.mark.parametrize("quantization", ["int8", "int4", "int8_weight_only"])
def test_parts_that_are_rounded_when_they_are_loaded(quantization: str, tmp_path: Path) -> None:
    tiny_models.build("llama-3", hidden_size=256, intermediate_size=256).save_pretrained(tmp_path)
    compare(tmp_path, torch.bfloat16, 0.15, quantization)


@pytest.mark.parametrize(
    ("name", "options", "quantization"),
    [("llama-3", {}, "none"), ("llama-3", {}, "int8"), ("llama-3", {"tie_word_embeddings": True}, "int4")],
)
def test_a_whole_head_gives_the_same_logits(
    name: str, options: dict[str, bool], quantization: str, tmp_path: Path
) -> None:
    """Rank 0 has it where a draft reads it, and scores its own columns alone."""
    tiny_models.build(name, hidden_size=256, intermediate_size=256, **options).save_pretrained(tmp_path)
    states, parts = torch.randn(5, 256).to(torch.bfloat16), load_parts(tmp_path, 2, torch.bfloat16, quantization)
    whole = load_decoder(tmp_path, torch.bfloat16, "cpu", 96, quantization)
    first = load_decoder(tmp_path, torch.bfloat16, "cpu", 96, quantization, RankPart(0, 2, whole_head=True))
    first.join(parts[0].ranks)  # type: ignore[arg-type]
    compare_logits(whole, [first, parts[1]], states)
    head, own = first.output_head, parts[1].output_head
    assert head is not None
    assert head.out_features == whole.config.vocab_size
    if own is not None and not (options and quantization == "none"):
        assert own.out_features == len(parts[1].config.columns.own)  # type: ignore[union-attr]


def test_columns_are_whole_tiles() -> None:
    assert Columns.of(RankPart(1, 3), 100).begins == (0, 32, 64, 100)
    assert Columns.of(RankPart(2, 3), 100).own == range(64, 100)


def test_three_and_four_ranks(tmp_path: Path) -> None:
    tiny_models.build("llama-3", num_attention_heads=12, num_key_value_heads=12, hidden_size=96).save_pretrained(
        tmp_path
    )
    for size in (3, 4):
        compare(tmp_path, torch.float32, 1e-4, size=size)


def test_groups_of_inputs_are_never_cut() -> None:
    codes = torch.arange(2 * 192, dtype=torch.int32).view(2, 192).to(torch.int8)
    weight = Coded(Code.INT8, codes, torch.rand(2, 3), 192, 64)
    with pytest.raises(ValueError, match=r"192 inputs with 64 in a group cannot be cut into 2 parts; use one of 1, 3$"):
        weight.part_of_inputs(RankPart(1, 2).of(192), 2)
    third = weight.part_of_inputs(RankPart(1, 3).of(192), 3)
    assert torch.equal(third.dequantize(), weight.dequantize()[:, 64:128])
