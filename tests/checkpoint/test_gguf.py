"""GGUF files: blocks mean what the library gguf says, bit for bit, and models compute with exactly that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf")

import numpy as np  # noqa: E402
from gguf import GGMLQuantizationType as Type  # noqa: E402
from test_quantised import logits  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)  # fmt: skip

import tiny_models  # noqa: E402
from gguf_makers import UNSTATED, blocks, embedded_gguf, meant, write_gguf  # noqa: E402
from native_checks import BUILT, use  # noqa: E402
from sametoken.checkpoint.gguf import blocks as rooms  # noqa: E402
from sametoken.checkpoint.gguf.blocks import read_tensor  # noqa: E402
from sametoken.checkpoint.gguf.config import LACKING  # noqa: E402
from sametoken.checkpoint.gguf.container import read_container  # noqa: E402
from sametoken.checkpoint.gguf.families import FAMILIES  # noqa: E402
from sametoken.checkpoint.gguf.parts import chosen_files  # noqa: E402
from sametoken.checkpoint.gguf.tokenizer import tokenizer_files  # noqa: E402
from sametoken.checkpoint.hub import read_config, resolve  # noqa: E402
from sametoken.checkpoint.load import load_decoder  # noqa: E402
from sametoken.checkpoint.tokenizer_files import load_tokenizer  # noqa: E402
from sametoken.errors import CheckpointError, ConfigError, HubError, UnsupportedModelError  # noqa: E402
from sametoken.model.config import ModelConfig  # noqa: E402
from sametoken.model.formats.base import signed_bytes  # noqa: E402
from sametoken.model.formats.coded import Coded, joined  # noqa: E402
from sametoken.model.linear import Linear  # noqa: E402
from sametoken.server.llama.infill import Marks, find_marks  # noqa: E402

TYPES = (
    Type.Q8_0, Type.Q4_0, Type.MXFP4, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q5_0, Type.Q4_1, Type.Q5_1, Type.IQ4_NL,
    Type.IQ4_XS, Type.Q3_K, Type.Q2_K, Type.NVFP4, Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S,
    Type.IQ3_XXS, Type.IQ3_S, Type.TQ1_0, Type.TQ2_0,
)  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.1,
    "pad_token_id": None,
}  # fmt: skip
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves nothing in the user's cache."""
    monkeypatch.setattr("sametoken.checkpoint.hub.opened_directory", lambda: tmp_path / "opened")


def written(file: Path, kind: Type, shape: tuple[int, int] = (48, 512)) -> tuple[Coded, torch.Tensor]:
    """A weight of a file, and what the library says that it means."""
    data = blocks(np.random.default_rng(1).standard_normal(shape).astype(np.float32), kind)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_tensor(read_container(file), "x")
    assert isinstance(found, Coded)
    return found, meant(data, kind)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_mean_what_the_library_says_bit_for_bit(tmp_path: Path, kind: Type) -> None:
    found, expected = written(tmp_path / "x.gguf", kind)
    assert torch.equal(found.dequantize().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_any_bytes_mean_what_the_library_says(kind: Type, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(rooms, "library", lambda: None)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(int(kind)).integers(0, 256, (16, 24 * size), dtype=np.uint8)
    if kind == Type.MXFP4:  # a scale of 255 is not a number, which ggml does not say
        data.reshape(16, 24, size)[..., 0] %= 255
    if kind == Type.NVFP4:  # 255 too; what writes files never has a sign there
        data.reshape(16, 24, size)[..., :4] %= 255
    with np.errstate(all="ignore"):
        expected = meant(data, kind).view(16, -1)
    found = rooms.coded_blocks(kind.name, torch.from_numpy(data).view(16, 24, size), 24 * numbers).dequantize()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", TYPES)
def test_headers_give_the_shapes_that_blocks_have(kind: Type) -> None:
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = torch.zeros(16, 24, size, dtype=torch.uint8)
    real = rooms.coded_blocks(kind.name, blocks, 24 * numbers)
    stated = rooms.coded_blocks(kind.name, blocks.to("meta"), 24 * numbers)
    for name, value in vars(real).items():
        other = getattr(stated, name)
        if isinstance(value, torch.Tensor):
            assert other.is_meta
            assert (other.shape, other.dtype) == (value.shape, value.dtype), name
        else:
            assert other == value, name


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("kernels", BUILT, ids=lambda kernels: kernels.name)
def test_compiled_products_of_blocks(tmp_path: Path, kind: Type, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(kernels, monkeypatch)
    found, expected = written(tmp_path / "x.gguf", kind)
    layer = Linear(512, 48, False, torch.bfloat16)
    layer.adopt(0, found)
    layer.pack()
    assert layer.native is not None
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    read = x.double()
    if found.rounds_blocks:  # bytes with one scale for 32 inputs
        q, scale = signed_bytes(x.view(-1, 32))
        read = (q.double() * scale.double()).view(x.shape)
    y, exact = layer(x), read @ expected.double().T
    assert (y.double() - exact).abs().max() < 2**-8 * exact.abs().max()  # one rounding to bfloat16, and float32 sums
    for count in (1, 2, 5):
        assert torch.equal(layer(x[:count]), y[:count])


def test_blocks_of_different_types_are_joined_without_loss(tmp_path: Path) -> None:
    parts = [written(tmp_path / f"{kind.name}.gguf", kind) for kind in TYPES if kind not in (Type.MXFP4, Type.NVFP4)]
    whole = joined([found for found, _ in parts])
    assert torch.equal(whole.dequantize(), torch.cat([expected for _, expected in parts]))
    k_types = [written(tmp_path / f"{kind.name}.gguf", kind) for kind in (Type.Q4_K, Type.Q6_K)]
    mixed = joined([found for found, _ in k_types])
    assert torch.equal(mixed.dequantize(), torch.cat([expected for _, expected in k_types]))


def q4_k_m(name: str) -> Type:
    """As llama.cpp mixes types in Q4_K_M."""
    part = name.split(".")[-2]
    return Type.Q6_K if part in ("attn_v", "ffn_down", "output", "token_embd") else Type.Q4_K


KINDS: dict[str, Any] = {kind.name: lambda name, kind=kind: kind for kind in (*TYPES, Type.F32, Type.F16, Type.BF16)}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("mix", [*KINDS, "Q4_K_M"])
def test_a_model_computes_with_what_its_blocks_mean(tmp_path: Path, family: str, mix: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**SIZES))
    model = write_gguf(tmp_path / "m.gguf", model, {**KINDS, "Q4_K_M": q4_k_m}[mix]).eval()
    tokens = torch.randint(4, 96, (24,), generator=torch.Generator().manual_seed(1))
    decoder = load_decoder(resolve(tmp_path / "m.gguf"), torch.float32, "cpu")
    with torch.no_grad():
        expected = model(tokens.unsqueeze(0)).logits[0]
    found = logits(decoder, tokens, (16, 8))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


SPARSE: dict[str, Any] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "intermediate_size": 256}),
    "qwen2_moe": (Qwen2MoeConfig, {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    }),
    "qwen3_moe": (Qwen3MoeConfig, {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
    }),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256,
                               "sliding_window": 8}),
}  # fmt: skip


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("mix", ["Q8_0", "MXFP4", "F32", "Q4_K_M"])
def test_experts_of_a_file_compute_with_what_their_blocks_mean(tmp_path: Path, family: str, mix: str) -> None:
    torch.manual_seed(0)
    kind, changes = SPARSE[family]
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes}))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" not in name:  # biases and sinks begin as zero
            torch.nn.init.normal_(parameter, std=0.1)
    model = write_gguf(tmp_path / "m.gguf", model, {**KINDS, "Q4_K_M": q4_k_m}[mix]).eval()
    tokens = torch.randint(4, 96, (24,), generator=torch.Generator().manual_seed(1))
    decoder = load_decoder(resolve(tmp_path / "m.gguf"), torch.float32, "cpu")
    with torch.no_grad():
        expected = model(tokens.unsqueeze(0)).logits[0]
    found = logits(decoder, tokens, (16, 8))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


# Sizes that whole blocks fill.
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
RANKS = {"moe_intermediate_size": 256, "num_key_value_heads": 16, "kv_lora_rank": 256}
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"intermediate_size_mlp": 256} for name in ("llama-4", "llama-4-images")},
    **{name: {"moe_intermediate_size": 256} for name in ("glm-4.5-moe", "glm-4.5-moe-plain")},
    **{name: {**RANKS, "v_head_dim": 16} for name in ("deepseek-v2-lite", "deepseek-v3-plain")},
    **{name: {**RANKS, "q_lora_rank": 256} for name in ("deepseek-v2", "deepseek-v3")},
}
NAMED = (
    "llama-3.1", "llama-yarn", "gemma-2", "gemma-3", "gemma-3-images", "olmo-2", "olmo-3", "granite-3", "smollm-3",
    "glm-4", "phi-3-long", "phi-3-short", "phi-4-mini", "qwen-3-vl", "glm", "glm-4.5-moe", "glm-4.5-moe-plain",
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-plain", "llama-4", "llama-4-images",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("mix", ["F32", "Q4_K_M"])
def test_every_family_computes_what_transformers_does(tmp_path: Path, name: str, mix: str) -> None:
    model = write_gguf(
        tmp_path / "m.gguf",
        tiny_models.build(name, **{**WIDE, **UNSTATED.get(name, {}), **CHANGES.get(name, {})}),
        {**KINDS, "Q4_K_M": q4_k_m}[mix],
    ).eval()
    limit = tiny_models.FAMILIES[name].max_seq_len
    decoder = load_decoder(resolve(tmp_path / "m.gguf"), torch.float32, "cpu", limit)
    tokens = torch.randint(4, 96, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens.unsqueeze(0)).logits[0]
    found = logits(decoder, tokens, (25, 15))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama-3.1", "mixtral"])
def test_scales_of_nvfp4_weights_and_of_each_expert_count(tmp_path: Path, name: str) -> None:
    model = tiny_models.build(name, **{**WIDE, **UNSTATED.get(name, {})})

    def scales(writer: gguf.GGUFWriter) -> None:
        for layer in range(model.config.num_hidden_layers):
            writer.add_tensor(f"blk.{layer}.attn_q.scale", np.array([0.25 * (layer + 1)], np.float32))
            writer.add_tensor(f"blk.{layer}.attn_q.input_scale", np.array([3.0], np.float32))
            if name == "mixtral":
                experts = np.arange(1, model.config.num_local_experts + 1, dtype=np.float32) / 2
                writer.add_tensor(f"blk.{layer}.ffn_down_exps.scale", experts)

    write_gguf(tmp_path / "m.gguf", model, KINDS["NVFP4"], metadata=scales).eval()
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            block.self_attn.q_proj.weight *= 0.25 * (layer + 1)
            if name == "mixtral":
                down = block.mlp.experts.down_proj
                down *= (torch.arange(1, len(down) + 1) / 2).view(-1, 1, 1)
        tokens = torch.randint(4, 96, (24,), generator=torch.Generator().manual_seed(1))
        expected = model(input_ids=tokens.unsqueeze(0)).logits[0]
    decoder = load_decoder(resolve(tmp_path / "m.gguf"), torch.float32, "cpu")
    assert (logits(decoder, tokens, (16, 8)) - expected).abs().max() <= 1e-4 * expected.abs().max()


def rewritten(tmp_path: Path, name: str, add: Any, **changes: Any) -> Path:
    """A file of a family with further keys."""
    model = tiny_models.build(name, **{**WIDE, **changes})
    write_gguf(tmp_path / "m.gguf", model, lambda name: Type.F32, metadata=add)
    return tmp_path / "m.gguf"


REFUSED: dict[str, Any] = {
    "granite-3": (lambda writer: writer.add_rope_scaling_finetuned(False), "Granite without RoPE"),
    "gemma-2": (
        lambda writer: writer.add_uint32("gemma2.attention.sliding_window_pattern", 0),
        r"sliding_window_pattern is 0, expected a number of layers or 3 flags",
    ),
    "llama-2": (lambda writer: writer.add_attention_scale(0.5), r"llama\.attention\.scale is 0\.5, which is not supp"),
    "smollm-3": (lambda writer: writer.add_logit_scale(3.0), r"smollm3\.logit_scale is 3\.0, which is not supported"),
    "llama-4": (lambda writer: writer.add_sliding_window(0), r"Llama 4 with attention\.sliding_window 0 is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_cannot_state_is_refused_by_name(tmp_path: Path, name: str) -> None:
    add, words = REFUSED[name]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words) as caught:
        resolve(rewritten(tmp_path, name, add))
    assert "m.gguf" in str(caught.value)


def test_layers_with_a_window_are_counted_where_a_file_does_not_list_them(tmp_path: Path) -> None:
    stated = {"attention.sliding_window_pattern": 3}
    for keys, window, expected in (({}, 9, (9, None, 9, None)), (stated, 8, (8, 8, None, 8))):
        file = rewritten(
            tmp_path,
            "gemma-2",
            lambda writer, keys=keys: [writer.add_uint32(f"gemma2.{key}", value) for key, value in keys.items()],
            num_hidden_layers=4,
            sliding_window=window,
        )
        assert ModelConfig.from_hf(read_config(resolve(file))).sliding_windows == expected


def damaged(folder: Path, change: Any) -> str:
    """What is said of a good file after `change` of its bytes."""
    written(folder / "x.gguf", Type.Q8_0)
    (folder / "y.gguf").write_bytes(change((folder / "x.gguf").read_bytes()))
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        resolve(folder / "y.gguf")
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "bytes are no GGUF file"),
        (lambda data: b"JUNK" + data[4:], "this is no GGUF file"),
        (lambda data: data[:4] + b"\x09\0\0\0" + data[8:], "GGUF of version 9"),
        (lambda data: data[:40], "bytes are stated and"),
        (lambda data: data[:-100], "truncated: x ends at byte"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "tensors and"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "bytes are stated and"),
        (lambda data: data.replace(b"llama", b"mamba"), "the architecture 'mamba' is not supported"),
        (lambda data: data.replace(b"llama", b"ll\x1bma"), r"the architecture 'll\x1bma' is not supported"),
        (lambda data: data, "has no token_embd.weight"),
    ],
)
def test_bad_files_are_refused_in_words(tmp_path: Path, change: Any, words: str) -> None:
    assert words in damaged(tmp_path, change)


def test_an_unknown_architecture_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    """Names of tensors are those of the gguf library, and each part of LACKING is one of them."""
    named = {
        gguf.MODEL_ARCH_NAMES[arch]: [gguf.TENSOR_NAMES[tensor].format(bid=0) for tensor in tensors]
        for arch, tensors in gguf.MODEL_TENSORS.items()
    }
    seen = set[str]()
    for arch in named.keys() - {name.split()[0] for name in FAMILIES}:
        writer = gguf.GGUFWriter(tmp_path / f"{arch}.gguf", arch)
        for tensor in dict.fromkeys(named[arch]):
            writer.add_tensor(tensor, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedModelError, match=f"{arch}.*is not supported in GGUF files") as caught:
            resolve(tmp_path / f"{arch}.gguf")
        seen |= {words for words in LACKING.values() if f"; it needs {words}, which" in str(caught.value)}
    assert seen == set(LACKING.values())


def with_keys(file: Path, **metadata: Any) -> Path:
    """A file of no tensors with numbers and texts as metadata."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_one_part_under_another_name_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"part 1 of 3 of a model, expected a name such as MODEL-00001-of-00003"):
        read_container(with_keys(tmp_path / "part.gguf", **{"split.count": 3, "split.no": 0}))
    with pytest.raises(CheckpointError, match=r"split\.count is 'three', expected a number"):
        read_container(with_keys(tmp_path / "text.gguf", **{"split.count": "three"}))
    assert read_container(with_keys(tmp_path / "whole.gguf", **{"split.count": 1})).metadata["split.count"] == 1


def test_no_name_of_a_file_commands_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        resolve(with_keys(tmp_path / "x.gguf", **{"llama.\x1b[2Jkey": 1}))
    assert r"llama.\x1b[2Jkey is 1" in str(caught.value)


def test_a_gguf_file_that_is_not_there_is_not_asked_for_on_the_hub(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.gguf"), "none.gguf"):
        with pytest.raises(CheckpointError, match=rf"there is no file {name}; expected the path of a GGUF file"):
            resolve(name)


def test_quantised_files_are_not_quantised_again(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    write_gguf(tmp_path / "m.gguf", model, lambda name: Type.Q8_0)
    with pytest.raises(ConfigError, match=r"the weights of .*/m\.gguf are quantised already"):
        load_decoder(resolve(tmp_path / "m.gguf"), torch.bfloat16, "cpu", quantization="int8")


TEXTS = (
    "Once upon a time, there was a little girl.",
    " two  spaces\nand lines\t",
    "caf\u00e9 \u4f60\u597d \U0001f600",
    "a 123,456",
)


def test_tokenizer_of_a_file(tmp_path: Path) -> None:
    file, source = embedded_gguf(tmp_path, "embedded", Type.Q8_0)
    ours, theirs = load_tokenizer(resolve(file)), load_tokenizer(source)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.eos_ids == theirs.eos_ids
    assert ours.bos_id == theirs.bos_id
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


def test_marks_of_a_gap_are_those_that_the_file_names(tmp_path: Path) -> None:
    ids = {"fim_pre_token_id": 300, "fim_suf_token_id": 301, "middle_token_id": 302, "fim_sep_token_id": 303}
    file, source = embedded_gguf(tmp_path, "embedded", Type.Q8_0, **ids)
    found = find_marks(load_tokenizer(resolve(file)))
    assert found == Marks(300, 301, 302, None, 303, (303,))
    assert find_marks(load_tokenizer(source)) is None


@pytest.mark.parametrize(
    ("name", "value"), [("token_type", 1), ("tokens", [1, 2]), ("merges", [1]), ("pre", ["llama-bpe"])]
)
def test_a_tokenizer_of_wrong_types_is_refused_in_words(name: str, value: Any) -> None:
    facts = {"model": "gpt2", "tokens": ["a", "b"], "merges": ["a b"], "pre": "llama-bpe", name: value}
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{name} "):
        tokenizer_files({f"tokenizer.ggml.{key}": each for key, each in facts.items()}, Path("a.gguf"))


NAMES = (
    "a-Q4_K_M.gguf", "a-q8_0.gguf", "a.BF16.gguf", "UD-Q4_K_XL/a-UD-Q4_K_XL-00001-of-00002.gguf", "mmproj-F16.gguf",
    "README.md", "b-IQ2_XXS.gguf", "b-IQ2_XXS.gguf.txt", "one/c-Q6_K.gguf", "two/c-Q6_K.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("Q4_K_M", "a-Q4_K_M.gguf"), ("q4_k_m", "a-Q4_K_M.gguf"), ("Q8_0", "a-q8_0.gguf"), ("BF16", "a.BF16.gguf"),
        ("IQ2_XXS", "b-IQ2_XXS.gguf"), ("one/c-Q6_K.gguf", "one/c-Q6_K.gguf"), ("a-q8_0.gguf", "a-q8_0.gguf"),
    ],
)  # fmt: skip
def test_a_kind_names_one_file_of_a_repository(kind: str, file: str) -> None:
    assert chosen_files("owner/name", kind, NAMES) == [file]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Q5_K_M", "no file for 'Q5_K_M', it has BF16, IQ2_XXS, Q4_K_M, Q6_K, Q8_0, UD-Q4_K_XL"),
        ("Q6_K", "2 files for 'Q6_K' .one/c-Q6_K.gguf, two/c-Q6_K.gguf."),
        ("UD-Q4_K_XL", "only parts of UD-Q4_K_XL/a-UD-Q4_K_XL-00001-of-00002.gguf: UD-Q4_K_XL/a-UD-Q4_K_XL-00002-of"),
        ("F16", "no file for 'F16'"),
    ],
)
def test_a_kind_that_names_no_one_file_is_refused(kind: str, words: str) -> None:
    with pytest.raises(HubError, match=words):
        chosen_files("owner/name", kind, NAMES)


PARTS = [f"x/m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("kind", "names", "files"),
    [
        ("Q4_K_M", PARTS, PARTS),
        ("x/m-Q4_K_M-00001-of-00003.gguf", PARTS, PARTS),
        ("m-Q4_K_M-00002-of-00003.gguf", PARTS[::-1], PARTS),
        ("", NAMES, ["a-Q4_K_M.gguf"]),
        ("", [name for name in NAMES if "Q4_K_M" not in name], ["a-q8_0.gguf"]),
        ("", ["mmproj-Q4_K_M.gguf", "mtp-x-Q4_K_M.gguf", "z-Q2_K.gguf", "b-Q6_K.gguf"], ["b-Q6_K.gguf"]),
        ("", [*PARTS, "a-Q8_0.gguf"], PARTS),
        ("Q4_K_XL", ["a-UD-Q4_K_XL.gguf", "a-Q4_K_L.gguf"], ["a-UD-Q4_K_XL.gguf"]),
        ("TQ1_0", ["a-TQ1_0.gguf", "a-NVFP4.gguf"], ["a-TQ1_0.gguf"]),
        ("nvfp4", ["a-TQ1_0.gguf", "a-NVFP4.gguf"], ["a-NVFP4.gguf"]),
    ],
)
def test_all_parts_of_a_kind_are_named_and_a_kind_is_chosen_where_none_is(
    kind: str, names: list[str], files: list[str]
) -> None:
    assert chosen_files("owner/name", kind, names) == files
