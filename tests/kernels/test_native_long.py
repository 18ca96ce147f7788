"""Attention over several chunks of keys in the compiled kernels: one result, whoever computes which chunk."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from native_checks import kernels, threads
from sametoken.kernels.cpu.library import Library
from sametoken.model import compiled as compiled_module
from sametoken.model import linear as linear_module
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.rope_config import RopeConfig
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.runtime.kv_format import FP8, INT8, OWN, KVFormat
from sametoken.speculation.draft import ancestors

__all__ = ["kernels", "threads"]  # fixtures

CHUNK, LENGTH, VOCAB, PAGE = 1024, 2100, 96, 16
PAGES = LENGTH // PAGE + 2
# The first layer's window begins in the middle of a chunk, and its sinks belong to the chunk where it begins.
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", family="llama", vocab_size=VOCAB, hidden_size=64, intermediate_size=32,
    num_layers=2, num_heads=6, num_kv_heads=3, head_dim=32, norm_eps=1e-5, activation="silu", sinks=True,
    tie_word_embeddings=False, sliding_windows=(1100, None), max_position=LENGTH + PAGE, eos_token_ids=(2,),
    bos_token_id=1, rope=RopeConfig("default", 10000.0, 32, 4096, 4096), dtype="bfloat16",
)  # fmt: skip


def build(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    decoder = Decoder(CONFIG, dtype)
    for index, parameter in enumerate(decoder.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) / 8
        parameter.data.copy_((1 + values if parameter.ndim == 1 else values).bfloat16())
    for module in decoder.modules():
        if hasattr(module, "pack"):
            module.pack()
    return decoder


class Text:
    """Two rows of a cache that a decoder writes."""

    def __init__(self, decoder: Decoder, form: KVFormat) -> None:
        self.decoder, table = decoder, PageTable(2, 2 * PAGES + 1, PAGES, PAGE, "cpu")
        order = torch.randperm(2 * PAGES, generator=torch.Generator().manual_seed(3)) + 1
        for row in range(2):
            table.extend(row, order[row * PAGES : (row + 1) * PAGES].tolist())
        self.cache = KVCache(2, CONFIG.num_kv_heads, CONFIG.head_dim, table, decoder.dtype, "cpu", form)

    def run(self, rows: list[int], starts: list[int], tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """States [B, N, H] after trees of `tokens` [B, N], chains unless `parents` [B, N] are given."""
        nodes = tokens.shape[1]
        parents = torch.arange(-1, nodes - 1).expand(len(rows), -1) if parents is None else parents
        span = Span(
            torch.tensor(rows), tuple(rows), torch.tensor(starts), ancestors(parents), nodes, max(starts) + nodes
        )
        return self.decoder(tokens.flatten(), self.cache, self.cache.view([span])).last.view(*tokens.shape, -1)


def drawn(count: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", [OWN, INT8, FP8])
def test_a_long_text_has_one_result(kernels: Library, form: KVFormat) -> None:
    """Read at once, in pieces, token by token over the ends of chunks, and as a path of a tree beside another row."""
    decoder, ids = build(), drawn(LENGTH)
    expected = Text(decoder, form).run([0], [0], ids)
    text = Text(decoder, form)
    ends = [1000, *range(CHUNK - 8, CHUNK + 4), 2030, 2046, *range(2 * CHUNK - 1, 2 * CHUNK + 5), 2080]
    for start, end in zip([0, *ends], [*ends, LENGTH], strict=True):
        assert torch.equal(text.run([1], [start], ids[:, start:end]), expected[:, start:end]), (start, end)
    text.run([0], [0], ids[:, : CHUNK - 2])
    # The path 0 - 1 - 3 - 5 has guesses between its nodes; it crosses the ends of two chunks.
    parents, path = torch.tensor([[-1, 0, 0, 1, 1, 3]]).expand(2, -1), [0, 1, 3, 5]
    starts = [CHUNK - 2, 2 * CHUNK - 1]
    drafts = drawn(12, seed=4).view(2, 6)
    for row, start in enumerate(starts):
        drafts[row, path] = ids[0, start : start + len(path)]
    found = text.run([0, 1], starts, drafts, parents)
    for row, start in enumerate(starts):
        assert torch.equal(found[row, path], expected[0, start : start + len(path)]), start


@cache
def of_torch(dtype: torch.dtype) -> Tensor:
    """States of the text without compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "library", lambda: None)
        patch.setattr(compiled_module, "library", lambda: None)
        return Text(build(dtype), OWN).run([0], [0], drawn(LENGTH))[0].float()


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_a_long_text_is_as_near_to_float32_as_with_torch(kernels: Library) -> None:
    compiled = build()
    assert compiled.native is not None
    found, exact = Text(compiled, OWN).run([0], [0], drawn(LENGTH))[0].float(), of_torch(torch.float32)
    ours, theirs = ((each - exact)[CHUNK:].norm() for each in (found, of_torch(torch.bfloat16)))
    assert ours <= 1.1 * theirs
