"""The compiled kernels against plain torch: formats, whole decoders, and bits that do not depend on company.

Every variant that this machine can run is tested; without a compiler there is none, and torch alone computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding, apply_rotary_emb

from native_checks import kernels, threads
from sametoken.checkpoint.load import load_decoder
from sametoken.errors import ConfigError
from sametoken.kernels.cpu import library as library_module
from sametoken.kernels.cpu import variant as native
from sametoken.kernels.cpu.library import Library
from sametoken.model import compiled as compiled_module
from sametoken.model import linear as linear_module
from sametoken.model.compiled_guesses import Committed
from sametoken.model.compiled_layers import blocks_of
from sametoken.model.decoder import Decoder
from sametoken.model.formats.names import FORMATS
from sametoken.model.formats.packing import pack_bfloat16
from sametoken.options.sampling import SamplingParams
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.runtime.kv_format import FP8, INT8, OWN, KVFormat
from sametoken.speculation.draft import ancestors
from sametoken.speculation.rows import RowSampling, Sampling

__all__ = ["kernels", "threads"]  # fixtures

VOCAB, PAGE, PAGES = 96, 16, 12
FORMS = [OWN, INT8, FP8]  # of what the cache stores
SHAPES = [(96, 64), (100, 200), (33, 260), (512, 128)]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"),
    "mistral": MistralConfig(**SIZES, sliding_window=21, hidden_act="gelu"),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "narrow": LlamaConfig(**{**SIZES, "head_dim": 48}),
    "phi3": Phi3Config(**{**SIZES, "head_dim": 64, "hidden_size": 256}, partial_rotary_factor=0.5, pad_token_id=0),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, sliding_window=21),
    "qwen2-moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=80, mlp_only_layers=[1]),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=True),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=6, num_experts_per_tok=3, sliding_window=21, swiglu_limit=0.5),
    "gemma2": Gemma2Config(**SIZES, sliding_window=21, attn_logit_softcapping=0.5, final_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=21, sliding_window_pattern=2, query_pre_attn_scalar=9, tie_word_embeddings=False
    ),
    "olmo2": Olmo2Config(**SIZES),
    "granite": GraniteConfig(
        **SIZES, embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.22, logits_scaling=4.0
    ),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[0, 1], pad_token_id=None),
    "glm4": Glm4Config(**SIZES, pad_token_id=None),
    "llama4": Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=96,
        num_local_experts=5,
        moe_layers=[0],
        no_rope_layers=[1, 0],
        floor_scale=16,
        attention_chunk_size=21,
        num_experts_per_tok=2,
        attn_scale=0.5,
        initializer_range=0.1,
    ),
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quantised_product_is_that_of_what_is_stored(kernels: Library, name: str, shape: tuple[int, int]) -> None:
    rule, weight, bias, x = FORMATS[name], randn(*shape, seed=1), randn(shape[0], seed=2), randn(37, shape[1])
    stored = rule.quantise(weight)
    meant = rule.dequantize(stored, shape[1])
    assert (meant - weight.float()).norm() <= {"int8": 0.01, "int4": 0.12}[name[:4]] * weight.float().norm()
    y = kernels.linear(rule.pack(weight, bias), x, torch.float32)
    exact = x.double() @ meant.double().t() + bias.double()
    allowed = 1e-5 if name == "int8_weight_only" else 0.012  # rows in eight bits are rounded by up to 0.4 %
    assert (y - exact).norm() <= allowed * exact.norm()


@pytest.mark.parametrize("name", ["int8", "int4", "int4_g128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_integer_formats_have_the_bits_of_plain_torch(kernels: Library, name: str, shape: tuple[int, int]) -> None:
    rule, x = FORMATS[name], randn(19, shape[1])
    x[3], x[4], x[5] = 0, 3, -3
    weight = randn(*shape, seed=1)
    weight[0], weight[-1] = 1.0, -1.0  # sums as large as they get
    assert torch.equal(kernels.linear(rule.pack(weight, None), x, torch.float32), rule.linear(x, rule.quantise(weight)))


@pytest.mark.parametrize("name", ["bfloat16", *FORMATS])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(kernels: Library, name: str, shape: tuple[int, int]) -> None:
    weight, bias, x = randn(*shape, seed=1), randn(shape[0], seed=2), randn(40, shape[1])
    packed = pack_bfloat16(weight, bias) if name == "bfloat16" else FORMATS[name].pack(weight, bias)
    alone = torch.cat([kernels.linear(packed, row.unsqueeze(0), torch.float32) for row in x])
    for rows in (2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 40):
        assert torch.equal(kernels.linear(packed, x[:rows], torch.float32), alone[:rows]), rows
    torch.testing.assert_close(kernels.linear(packed, x, torch.bfloat16), alone.bfloat16(), rtol=0, atol=0)


def test_a_packed_table_gives_its_rows_back(kernels: Library) -> None:
    weight = randn(33, 71).bfloat16()
    rows = torch.tensor([0, 32, 15, 16, 7])
    assert torch.equal(kernels.rows(pack_bfloat16(weight, None), rows), weight[rows])


class Text:
    """Rows of a cache that a decoder writes."""

    def __init__(self, decoder: Decoder, form: KVFormat = OWN, rows: int = 3) -> None:
        config = decoder.config
        self.decoder, self.table = decoder, PageTable(rows, rows * PAGES + 1, PAGES, PAGE, "cpu")
        order = torch.randperm(rows * PAGES, generator=torch.Generator().manual_seed(3)) + 1
        for row in range(rows):
            self.table.extend(row, order[row * PAGES : (row + 1) * PAGES].tolist())
        shape = config.num_layers, config.num_kv_heads, config.head_dim
        self.cache = KVCache(*shape, self.table, decoder.dtype, "cpu", form)

    def run(self, rows: list[int], starts: list[int], tokens: Tensor, parents: Tensor) -> Tensor:
        """Logits [B, N, V] of trees [B, N] after `starts` committed tokens."""
        spans = [
            Span(torch.tensor(rows), rows, torch.tensor(starts), ancestors(parents), tokens.shape[1], 0)._replace(
                longest=max(starts) + tokens.shape[1]
            )
        ]
        hidden = self.decoder(tokens.flatten(), self.cache, self.cache.view(spans), (0,))
        assert hidden.taps[0].shape == hidden.last.shape
        return self.decoder.logits(hidden.last).view(*tokens.shape, -1)

    def chain(self, row: int, start: int, tokens: Tensor) -> Tensor:
        parents = torch.arange(-1, len(tokens) - 1).unsqueeze(0)
        return self.run([row], [start], tokens.unsqueeze(0), parents)[0]


@pytest.fixture(params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(5)
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(CONFIGS[request.param]).to(torch.bfloat16).save_pretrained(folder)
    return folder


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.cover
@pytest.mark.parametrize("form", FORMS)
def test_a_decoder_computes_what_torch_computes(kernels: Library, directory: Path, form: KVFormat) -> None:
    text = tokens(150)
    compiled = load_decoder(directory, torch.bfloat16, "cpu")
    assert compiled.native is not None
    logits = Text(compiled, form).chain(0, 0, text)
    exact = Text(load_decoder(directory, torch.float32, "cpu"), form).chain(0, 0, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "library", lambda: None)
        patch.setattr(compiled_module, "library", lambda: None)
        plain = Text(load_decoder(directory, torch.bfloat16, "cpu"), form).chain(0, 0, text).float()
    # As near to float32 as torch's own bfloat16 is, which rounds at the same places and a few more. Rounding makes a
    # few tokens choose another of two experts with almost the same score.
    sure = len(text) if compiled.config.experts is None else len(text) - 4
    ours, theirs = ((each - exact).norm(dim=-1).sort().values[:sure].norm() for each in (logits, plain))
    assert ours <= 1.1 * theirs


@pytest.mark.cover
@pytest.mark.parametrize("form", [INT8, FP8])
def test_codes_have_the_bits_of_plain_torch(kernels: Library, directory: Path, form: KVFormat) -> None:
    """In the first layer, whose keys and values depend on no attention before."""
    decoder, text = load_decoder(directory, torch.bfloat16, "cpu"), tokens(150)
    numbers, codes = Text(decoder), Text(decoder, form)
    for stored in (numbers, codes):
        stored.chain(1, 0, text)
    for plane in ("key", "value"):
        found = getattr(codes.cache, f"{plane}s")[0], getattr(codes.cache, f"{plane}_scales")[0]
        slots = numbers.table.slots(torch.tensor([1]), torch.arange(150).unsqueeze(0)).flatten()
        expected = form.encode(getattr(numbers.cache, f"{plane}s")[0, slots])
        for got, want in zip(found, expected, strict=True):
            assert want is not None
            assert torch.equal(got[slots], want)
            got[slots] = 0
            assert not got.any(), "nothing else was written"


@pytest.mark.cover
@pytest.mark.parametrize("form", FORMS)
def test_a_node_has_the_bits_of_plain_decoding(kernels: Library, directory: Path, form: KVFormat) -> None:
    decoder = load_decoder(directory, torch.bfloat16, "cpu")
    text, guesses = tokens(70), tokens(6, seed=2)
    whole = Text(decoder, form)
    expected = whole.chain(0, 0, torch.cat([text, guesses[[0, 1, 3]]]))
    other = Text(decoder, form)
    for start, end in ((0, 1), (1, 30), (30, 66), (66, 70)):  # the prompt in pieces, beside nobody
        assert torch.equal(other.chain(1, start, text[start:end]), expected[start:end])
    other.chain(2, 0, tokens(40, seed=9))
    # root, two children, their children: the path 0 - 1 - 3 has the gap of node 2 in it
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]]).expand(2, -1)
    drafts = torch.stack([guesses, tokens(6, seed=4)])
    found = other.run([1, 2], [70, 40], drafts, parents)
    assert torch.equal(found[0, [0, 1, 3]], expected[70:73])


def test_keys_of_llama_4_are_rotated_as_transformers_does(kernels: Library, tmp_path: Path) -> None:
    config = Llama4TextConfig(**SIZES, num_local_experts=5, moe_layers=[0], no_rope_layers=[1, 0], use_qk_norm=False)
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    decoder, ids, places = load_decoder(tmp_path, torch.bfloat16, "cpu"), tokens(150), torch.arange(150).unsqueeze(0)
    block, text = blocks_of(decoder)[0], Text(decoder)
    text.chain(1, 0, ids)
    assert block.qkv.native is not None
    assert block.attention_norm is not None
    norm = block.attention_norm.weight, decoder.config.norm_eps, 0.0
    qkv = kernels.linear(block.qkv.native, decoder.embed(ids), torch.bfloat16, norm).view(
        150, -1, decoder.config.head_dim
    )
    keys = qkv[None, :, decoder.config.num_heads :][:, :, : decoder.config.num_kv_heads]
    _, wanted = apply_rotary_emb(keys, keys, Llama4TextRotaryEmbedding(config)(keys, places))
    assert torch.equal(text.cache.keys[0, text.table.slots(torch.tensor([1]), places).flatten()], wanted[0])


def test_an_unknown_variant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "sse9")
    with pytest.raises(ConfigError, match=r"sse9.*auto, off, amx, avx512, avx2, neon"):
        native.choose()[0]
    monkeypatch.setenv(native.SWITCH, "off")
    assert native.choose()[0] is None


def test_a_library_of_other_sources_is_left_alone(kernels: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "INTERFACE", -1)
    monkeypatch.setenv(native.SWITCH, "auto")
    assert native.choose()[0] is None
    monkeypatch.setenv(native.SWITCH, kernels.name)
    with pytest.raises(ConfigError, match="not built from these sources"):
        native.choose()[0]


@pytest.mark.cover
@pytest.mark.parametrize("form", FORMS)
def test_a_greedy_chain_is_step_by_step_argmax(kernels: Library, directory: Path, form: KVFormat) -> None:
    decoder = load_decoder(directory, torch.bfloat16, "cpu")
    assert decoder.native is not None
    rows, lengths, levels = [0, 2, 1], [40, 7, 66], 5
    stepped, expected = Text(decoder, form), []
    texts = [tokens(length, seed=row) for row, length in zip(rows, lengths, strict=True)]
    for row, text in zip(rows, texts, strict=True):
        drawn = [text[-1], stepped.chain(row, 0, text)[-1].argmax()]
        for level in range(levels - 1):
            drawn.append(stepped.chain(row, len(text) + level, drawn[-1].view(1))[-1].argmax())
        expected.append(torch.stack(drawn))
    greedy = Sampling.of([RowSampling(SamplingParams(temperature=0), 0, [], VOCAB)] * len(rows))
    certain = Committed(rows, [0, 0, 0], [text.tolist() for text in texts])
    assert torch.equal(
        decoder.native.guess(certain, Text(decoder, form).cache, [levels] * 3, greedy, None).tokens,
        torch.stack(expected),
    )
