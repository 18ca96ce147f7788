"""Mixtures of experts in the compiled kernels: against the same layers in torch, which weights are read, whose bits.

Formats of weights, numbers of rows, trees and threads are drawn by chance.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matrix import crossed
from native_checks import kernels, threads
from sametoken.kernels.cpu.library import Library
from sametoken.model.compiled import Compiled
from sametoken.model.compiled_layers import blocks_of
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Code, Coded
from sametoken.model.formats.names import FORMATS
from sametoken.model.linear import Linear
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import PADDING, ancestors

__all__ = ["kernels", "threads"]  # fixtures

VOCAB, PAGE, PAGES, ROWS = 300, 16, 6, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {
        "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 9, "num_experts_per_tok": 4,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 80, "mlp_only_layers": [],
    },
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 40, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "moe_intermediate_size": 32,
    },
    "glm-4.5": {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 2, "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 0, "use_qk_norm": True,
    },
    "llama-4": {
        "architectures": ["Llama4ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "floor_scale": 8,
        "attention_chunk_size": 16, "no_rope_layers": [1, 0],
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 16,
        "swiglu_limit": 0.5,
    },
}  # fmt: skip


def mxfp4(linear: Linear) -> Coded:
    """Random codes in place of a linear's weight."""
    codes = torch.randint(0, 256, (linear.out_features, linear.in_features // 2), dtype=torch.uint8)
    scale = torch.randint(119, 122, (linear.out_features, linear.in_features // 32), dtype=torch.uint8)
    return Coded(Code.FP4, codes, scale.view(torch.float8_e8m0fnu), linear.in_features, 32, None, None, None)


def build(kind: str, format: str = "bfloat16", seed: int = 0) -> Decoder:
    """A decoder with random weights, experts in a format."""
    torch.manual_seed(seed)
    decoder = Decoder(ModelConfig.from_hf({**SIZES, **KINDS[kind]}), torch.bfloat16, FORMATS.get(format))
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    for name, module in list(decoder.named_modules()):
        if isinstance(module, Linear) and format == "mxfp4" and ".experts.each" in name:
            module.adopt(0, mxfp4(module))
        if hasattr(module, "pack"):
            module.pack()
    return decoder


class Text:
    """Rows of a cache, and forwards of trees in them."""

    def __init__(self, decoder: Decoder) -> None:
        config, self.decoder = decoder.config, decoder
        table = PageTable(ROWS, ROWS * PAGES + 1, PAGES, PAGE, "cpu")
        for row in range(ROWS):
            table.extend(row, range(1 + row * PAGES, 1 + (row + 1) * PAGES))
        self.cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, torch.bfloat16, "cpu")

    def run(self, rows: list[int], starts: list[int], tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """States [B, N, H] after trees of `tokens` [B, N], chains unless `parents` [B, N] are given."""
        nodes = tokens.shape[1]
        parents = torch.arange(-1, nodes - 1).expand(len(rows), -1) if parents is None else parents
        longest = max(starts) + nodes
        span = Span(torch.tensor(rows), tuple(rows), torch.tensor(starts), ancestors(parents), nodes, longest)
        return self.decoder(tokens.flatten(), self.cache, self.cache.view([span])).last.view(*tokens.shape, -1)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.cover
@pytest.mark.parametrize(("kind", "format"), crossed(KINDS, ["bfloat16", "int8", "int4", "mxfp4"]))
def test_a_layer_has_the_numbers_of_torch(kernels: Library, kind: str, format: str) -> None:
    """Texts of one token, whose attention is the same product: what differs is how exactly an activation is rounded.

    So two experts with almost the same score may change places, but hardly in two of six rows.
    """
    decoder, rows = build(kind, format), list(range(ROWS))
    assert decoder.native is not None
    found = Text(decoder).run(rows, [0] * ROWS, drawn(ROWS, 1)).float()
    decoder.__dict__["native"] = None
    expected = Text(decoder).run(rows, [0] * ROWS, drawn(ROWS, 1)).float()
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.flatten().sort().values[-2] <= (0.01 if format in ("bfloat16", "mxfp4") else 0.03)


@pytest.mark.cover
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_chosen_experts_are_read(kernels: Library, kind: str) -> None:
    """The experts that nobody chose become NaN, and nothing changes; those that somebody chose are missed."""
    decoder, rows = build(kind), list(range(3))
    tokens = drawn(3, 1)
    chosen: list[set[int]] = [set() for _ in decoder.blocks]
    native, decoder.__dict__["native"] = decoder.native, None
    for block, seen in zip(blocks_of(decoder), chosen, strict=True):
        experts = block.experts
        assert experts is not None
        route = experts.route
        experts.route = lambda logits, route=route, seen=seen: [  # type: ignore[method-assign]
            routed := route(logits),
            seen.update(routed[1].flatten().tolist()),
        ][0]
    Text(decoder).run(rows, [0] * 3, tokens)
    decoder.__dict__["native"] = native
    expected = Text(decoder).run(rows, [0] * 3, tokens)
    for block, seen in zip(blocks_of(decoder), chosen, strict=True):
        assert block.experts is not None
        assert 0 < len(seen) < len(block.experts.each)
        for index, expert in enumerate(block.experts.every[: len(block.experts.each)]):
            if index not in seen:
                poison(expert.gate_up)
                poison(expert.down)
    assert torch.equal(Text(decoder).run(rows, [0] * 3, tokens), expected)
    poison(blocks_of(decoder)[-1].experts.every[min(chosen[-1])].down)  # type: ignore[union-attr]
    assert not torch.equal(Text(decoder).run(rows, [0] * 3, tokens), expected)


def poison(linear: Linear) -> None:
    assert linear.native is not None
    linear.native.parts["data"].view(torch.bfloat16).fill_(torch.nan)


@pytest.mark.cover
@pytest.mark.parametrize(("kind", "format"), crossed(KINDS, ["bfloat16", "int8", "int4", "mxfp4"]))
def test_a_row_has_the_same_bits_in_any_company(kernels: Library, kind: str, format: str) -> None:
    """Plain decoding of each row alone against batches of random drafts, with padding, in one cache or another."""
    decoder, chance = build(kind, format), random.Random(f"{kind} {format}")
    assert isinstance(decoder.native, Compiled)
    texts, alone = drawn(ROWS, 60, seed=chance.randrange(99)), Text(decoder)
    plain = torch.stack(
        [
            torch.cat([alone.run([row], [i], texts[row : row + 1, i : i + 1])[0] for i in range(60)])
            for row in range(ROWS)
        ]
    )
    for row in range(ROWS):
        assert torch.equal(Text(decoder).run([row], [0], texts[row : row + 1])[0], plain[row])
    for _ in range(12):
        rows = chance.sample(range(ROWS), chance.randint(1, ROWS))
        starts, nodes = [chance.randrange(40) for _ in rows], chance.randint(1, 12)
        parents = torch.tensor([[-1, *(chance.randrange(node) for node in range(1, nodes))] for _ in rows])
        tokens = drawn(len(rows), nodes, seed=chance.randrange(999))
        paths = []
        for tree, row, start, its in zip(tokens, rows, starts, parents.tolist(), strict=True):
            path, node = [], nodes - 1
            while node >= 0:
                path, node = [node, *path], its[node]
            tree[path] = texts[row, start : start + len(path)]
            for node in range(nodes):
                if node not in path and chance.random() < 0.3:
                    tree[node] = PADDING
            paths.append(path)
        found = alone.run(rows, starts, tokens, parents)
        for i, (row, start, path) in enumerate(zip(rows, starts, paths, strict=True)):
            assert torch.equal(found[i, path], plain[row, start : start + len(path)])
            alone.run([row], [start], texts[row : row + 1, start : start + nodes])  # as it was


def test_the_number_of_threads_shows_nowhere(kernels: Library) -> None:
    decoder = build("qwen2")
    tokens, found = drawn(ROWS, 40), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(Text(decoder).run(list(range(ROWS)), [0] * ROWS, tokens))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_long_prompt_is_that_of_its_parts(kernels: Library) -> None:
    """More rows than the experts gather at once."""
    decoder = build("mixtral")
    tokens = drawn(ROWS, 96)
    whole, text = Text(decoder).run(list(range(ROWS)), [0] * ROWS, tokens), Text(decoder)
    for row in range(ROWS):
        assert torch.equal(text.run([row], [0], tokens[row : row + 1])[0], whole[row])
