"""A row's bits do not depend on its neighbours, on how its prompt was cut, or on what was drafted beside it.

Compared bit for bit, the parts on two threads as well: pointwise operations and kernels split their work among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

import tiny_models
from native_checks import BUILT, use
from sametoken.checkpoint.load import load_decoder
from sametoken.kernels.cpu.library import Library
from sametoken.model.attention import attend
from sametoken.model.formats.names import FORMATS
from sametoken.model.layers import gated
from sametoken.model.linear import Linear
from sametoken.model.product import ROW_BLOCK
from sametoken.model.rotary import apply_rope
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import ancestors

DTYPES = (torch.bfloat16, torch.float32)
PAGE = 16
CAPACITY = 48  # pages of a row


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 64), (513, 96), (256, 1376)])
@pytest.mark.parametrize("packed", [True, False])
def test_linear(dtype: torch.dtype, shape: tuple[int, int], packed: bool) -> None:
    layer = Linear(shape[1], shape[0], True, dtype)
    layer.weight.copy_(randn(*shape, seed=1))
    assert layer.bias is not None
    layer.bias.copy_(randn(shape[0], seed=2))
    if packed:
        layer.pack()
    block = ROW_BLOCK[dtype]
    x = randn(block + 70, shape[1], dtype=dtype)
    pairs = torch.cat([layer(part) for part in (*torch.split(x[:100], 2), *torch.split(x[100:], 14))])
    for rows in (3, 5, 8, 16, 17, 31, block - 1, block, block + 1, block + 65):
        for first in (0, 1):
            assert torch.equal(layer(x[first : first + rows]), pairs[first : first + rows]), (rows, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [F.silu, F.gelu])
@pytest.mark.parametrize("width", [101, 1376])
def test_pointwise(dtype: torch.dtype, activation: Any, width: int) -> None:
    gate_up = randn(120, 2 * width, dtype=dtype)
    pairs = torch.cat([gated(activation, part) for part in torch.split(gate_up, 2)])
    for rows in (3, 5, 33, 49, 117, 120):
        assert torch.equal(gated(activation, gate_up[:rows]), pairs[:rows]), rows
    angles = randn(120, 1, 24, dtype=dtype)
    heads = randn(120, 3, 24, dtype=dtype)
    turned = apply_rope(heads, angles.cos(), angles.sin())
    assert torch.equal(apply_rope(heads[3:8], angles[3:8].cos(), angles[3:8].sin()), turned[3:8])


class Rows:
    """Rows of one cache that all hold the same keys: row 0 side by side, the others in scattered pages."""

    def __init__(self, rows: int, layers: int, heads: int, size: int, dtype: torch.dtype, shared: bool = False) -> None:
        self.table = PageTable(rows, rows * CAPACITY + CAPACITY, CAPACITY + 40, PAGE, "cpu")
        self.table.extend(0, range(1, CAPACITY + 1))
        rest = torch.randperm((rows - 1) * CAPACITY, generator=torch.Generator().manual_seed(4)) + CAPACITY + 1
        for row, pages in enumerate(rest.view(-1, CAPACITY).tolist(), start=1):
            self.table.extend(row, pages)
        self.cache = KVCache(layers, heads, size, self.table, dtype, "cpu", shared_values=shared)

    def span(self, rows: Sequence[int], starts: Sequence[int], parents: Sequence[int]) -> Span:
        ancestor_mask = ancestors(torch.tensor([parents] * len(rows)))
        index = torch.tensor(rows), rows, torch.tensor(starts)
        return Span(*index, ancestor_mask, len(parents), max(starts) + len(parents))


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


# Head size, key heads, query heads per key head: what the kernels were seen to treat differently.
BFLOAT16 = [
    (16, 4, 1),
    (48, 2, 4),
    (64, 4, 1),
    (64, 1, 8),
    (80, 4, 1),
    (80, 1, 8),
    (96, 4, 1),
    (128, 4, 1),
    (128, 2, 4),
]
FLOAT32 = [(16, 4, 1), (64, 2, 4), (80, 1, 8)]
CASES = [(torch.bfloat16, *case) for case in BFLOAT16] + [(torch.float32, *case) for case in FLOAT32]


@pytest.mark.cover
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize(("dtype", "size", "key_heads", "groups"), CASES)
def test_attention(dtype: torch.dtype, size: int, key_heads: int, groups: int, cap: float | None) -> None:
    """Widths, lengths across the blocks of 128 and 512 keys, company and page order."""
    length = 740
    keys, values = (
        randn(length, key_heads, size, seed=1, dtype=dtype),
        randn(length, key_heads, size, seed=2, dtype=dtype),
    )
    queries = randn(length, key_heads * groups, size, seed=3, dtype=dtype)
    rows = Rows(4, 1, key_heads, size, dtype)
    for row in range(4):
        slots = rows.table.slots(torch.tensor([row]), torch.arange(length).unsqueeze(0)).flatten()
        rows.cache.write(0, slots, keys, values)

    def run(company: list[int], starts: list[int], nodes: int) -> Tensor:
        at = torch.cat([torch.arange(start, start + nodes) for start in starts])
        view = rows.cache.view([rows.span(company, starts, chain(nodes))])
        return attend(queries[at], keys[at], values[at], cache=rows.cache, view=view, layer=0, window=None, cap=cap)

    whole = run([0], [0], length)
    for start, widths in ((3, (1, 5, 16)), (125, (1, 2, 3, 9, 33)), (508, (1, 4, 8, 15, 17, 64, 200))):
        for nodes in widths:
            expected = whole[start : start + nodes]
            assert torch.equal(run([0], [start], nodes), expected), (start, nodes)
            assert torch.equal(run([1], [start], nodes), expected), (start, nodes)
            if nodes <= 17:
                got = run([2, 0, 3, 1], [0, start, 700, 64], nodes)[nodes : 2 * nodes]
                assert torch.equal(got, expected), (start, nodes)


SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"hidden_size": 384, "intermediate_size": 1000, "num_attention_heads": 6, "num_key_value_heads": 2},
    "multi-head": {"hidden_size": 256, "intermediate_size": 172, "num_attention_heads": 4, "num_key_value_heads": 4},
    "tied, small heads": {
        "hidden_size": 72, "intermediate_size": 101, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits(dtype: torch.dtype, shape: str, tmp_path: Path) -> None:
    """A whole decoder: prefilled in one piece, in pieces, decoded singly and in a batch, verified in a tree."""
    check_decoder(save_llama(shape, tmp_path), dtype, "none")


@pytest.mark.cover
@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("variant", [*BUILT, None], ids=lambda each: "off" if each is None else each.name)
def test_logits_of_every_format(
    dtype: torch.dtype, quantization: str, variant: Library | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every variant of the compiled kernels, and without."""
    use(variant, monkeypatch)
    check_decoder(save_llama("grouped", tmp_path), dtype, quantization)


@pytest.mark.cover
@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [*BUILT, None], ids=lambda each: "off" if each is None else each.name)
@pytest.mark.parametrize("kind", [Qwen2MoeConfig, GptOssConfig, Glm4MoeConfig, DeepseekV3Config, Llama4TextConfig])
def test_logits_of_experts(
    kind: type[PreTrainedConfig],
    dtype: torch.dtype,
    variant: Library | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token's bits do not depend on which other tokens chose the same expert."""
    use(variant, monkeypatch)
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "hidden_size": 128, "num_attention_heads": 2}
    experts = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "mlp_only_layers": [1]}
    shared = {"shared_expert_intermediate_size": 48, "initializer_range": 0.05}
    if kind in (Glm4MoeConfig, DeepseekV3Config):
        options |= {**tiny_models.GROUPS, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    if kind is DeepseekV3Config:
        options |= {**tiny_models.LATENT, "num_key_value_heads": 2}
    if kind is Llama4TextConfig:
        options |= {**tiny_models.LLAMA4, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}
    config = kind(**{**tiny_models.COMMON, **options, **experts, **shared})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    check_decoder(tmp_path, dtype, "none")


@pytest.mark.cover
@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [*BUILT, None], ids=lambda each: "off" if each is None else each.name)
@pytest.mark.parametrize("kind", [Gemma2Config, Gemma3TextConfig, Glm4Config, GraniteConfig, Olmo2Config])
def test_logits_of_families(
    kind: type[PreTrainedConfig],
    dtype: torch.dtype,
    variant: Library | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What these have beyond a plain decoder keeps a token's bits too."""
    use(variant, monkeypatch)
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "head_dim": 32, "initializer_range": 0.05}
    special = {"sliding_window": 100, "attn_logit_softcapping": 2.0, "residual_multiplier": 0.3, "logits_scaling": 3.0}
    config = kind(**{**tiny_models.COMMON, **options, **special, "vocab_size": tiny_models.VOCAB})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    check_decoder(tmp_path, dtype, "none")


def save_llama(shape: str, directory: Path) -> Path:
    options = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "head_dim": 64, "initializer_range": 0.05}
    torch.manual_seed(0)
    config = LlamaConfig(**{**tiny_models.COMMON, **options, **SHAPES[shape]})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def check_decoder(directory: Path, dtype: torch.dtype, quantization: str) -> None:
    decoder = load_decoder(directory, dtype, "cpu", quantization=quantization)
    facts = decoder.config
    text = torch.randint(0, tiny_models.VOCAB, (560,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Rows(4, facts.num_layers, facts.cached_heads, sum(facts.cached_parts), dtype, facts.shared_values)

    def run(company: list[int], starts: list[int], tokens: list[list[int]], parents: list[int]) -> Tensor:
        view = rows.cache.view([rows.span(company, starts, parents)])
        hidden = decoder(torch.tensor(tokens).flatten(), rows.cache, view).last
        return decoder.logits(hidden).view(len(company), len(parents), -1)

    def say(row: int, start: int, count: int) -> Tensor:
        return run([row], [start], [text[start : start + count]], chain(count))[0]

    whole = say(0, 0, len(text))
    start = 0
    for piece in (7, 2, 100, 33, 300, 118):
        assert torch.equal(say(1, start, piece), whole[start : start + piece]), piece
        start += piece
    for row in (2, 3):
        say(row, 0, len(text))
    for nodes in (1, 2, 5, 17):
        starts = [130, 509, 3]
        got = run([1, 2, 3], starts, [text[s : s + nodes] for s in starts], chain(nodes))
        assert all(torch.equal(got[i], whole[s : s + nodes]) for i, s in enumerate(starts)), nodes
    for start in (100, 126, 509):
        # The text is the path 0, 2, 4, 7 of a tree whose other nodes stand between its tokens.
        tokens = [text[start], 5, text[start + 1], 6, text[start + 2], 7, 8, text[start + 3]]
        got = run([2, 3], [start, 20], [tokens, tokens], [-1, 0, 0, 1, 2, 2, 4, 4])[0]
        assert torch.equal(got[[0, 2, 4, 7]], whole[start : start + 4]), start
        say(2, start, 8)
        padded = run([0], [start], [[text[start], -1]], chain(2))[0]
        assert torch.equal(padded[0], whole[start]), start
        say(0, start, 2)
