"""The Triton attention kernel in Triton's interpreter: right against `scaled_dot_product_attention`, and a token's
bits the same in a tree, in company and in a batch as alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: run `make test-triton`")

import triton.language as tl
from triton.runtime import interpreter

from sametoken.kernels.triton.attention import CHUNK, TreeTiles, paged_attention
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.runtime.kv_format import FORMATS, FP8, INT8, OWN, KVFormat
from sametoken.speculation.draft import ancestors, depth

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
BUSH = [-1, 0, 0, 1, 2, 2, 4, 4]  # the path 0, 2, 4, 7 has other branches between its nodes


def fixed_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """A product whose rows do not depend on where they stand, as a tensor core's; numpy's do, and know no bfloat16."""

    def widened(x: Any) -> Any:
        bits = x.data.astype(np.uint32) << 16 if x.dtype.scalar == tl.bfloat16 else None
        return x.data.astype(np.float32) if bits is None else bits.view(np.float32)

    return interpreter.TensorHandle((widened(a)[:, :, None] * widened(b)[None]).sum(1) + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def tensor_core(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", fixed_dot)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Stored:
    """Rows that hold the same text of keys and values, each in its own scattered pages."""

    def __init__(
        self, rows: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype, form: KVFormat = OWN
    ) -> None:
        self.heads, self.kv_heads, self.size = heads
        pages = -(-length // PAGE) + 1
        order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(4)) + 1
        self.table = PageTable(rows, rows * pages + 1, pages, PAGE, DEVICE)
        for row, own in enumerate(order.view(rows, pages).tolist()):
            self.table.extend(row, own)
        self.length, self.rows = length, rows
        self.q = randn(length, self.heads, self.size, seed=1, dtype=dtype)
        self.k = randn(length, self.kv_heads, self.size, seed=2, dtype=dtype)
        self.v = randn(length, self.kv_heads, self.size, seed=3, dtype=dtype)
        self.cache = KVCache(1, self.kv_heads, self.size, self.table, dtype, DEVICE, form)
        # What nobody wrote is poison: a kernel that reads it shows.
        for stored in (self.cache.keys, self.cache.values, self.cache.key_scales, self.cache.value_scales):
            if stored is not None and stored.is_floating_point():
                stored.fill_(float("nan"))

    def write(self, row: int, start: int, count: int, at: Sequence[int] | None = None) -> None:
        """Puts the text's tokens start + at[0], ... at the row's indexes start, start + 1, ..."""
        text = torch.tensor(at if at is not None else range(count), device=DEVICE) + start
        index = torch.arange(start, start + count, device=DEVICE).unsqueeze(0)
        slots = self.table.slots(torch.tensor([row], device=DEVICE), index).flatten()
        self.cache.write(0, slots, self.k[text], self.v[text])

    def attend(
        self, rows: Sequence[int], starts: Sequence[int], parents: Sequence[int], window: int | None = None,
        nodes: int | None = None, spare: int = 0, scale: float | None = None, cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, N, Hq * D]; a node at depth d of a tree has the query of the text's token start + d."""
        ancestor_mask = ancestors(torch.tensor([parents] * len(rows), device=DEVICE))
        at = torch.tensor(starts, device=DEVICE)
        count = nodes or len(parents)
        span = Span(torch.tensor(rows, device=DEVICE), rows, at, ancestor_mask, count, max(starts) + len(parents))
        group = self.heads // self.kv_heads
        tree = TreeTiles.of(span.rows, at, ancestor_mask, count, self.table.table, PAGE, span.longest + spare, group)
        tokens = (at.unsqueeze(1) + depth(ancestor_mask))[:, -count:].flatten()
        cache, scales = self.cache, None
        if cache.key_scales is not None and cache.value_scales is not None:
            scales = cache.key_scales[0], cache.value_scales[0]
        # Queries lie beside the keys, as a rotation of both leaves them.
        q = torch.cat([self.q[tokens], torch.full_like(self.q[tokens], float("nan"))], dim=1)[:, : self.heads]
        out = paged_attention(q, cache.keys[0], cache.values[0], tree, window, scales, scale, cap)
        return out.view(len(rows), count, -1)

    def oracle(self, position: int, window: int | None) -> Tensor:
        """[Hq * D] of the text's token at `position`, by torch in float32 on what is stored of the text."""
        first, form = 0 if window is None else max(0, position - window + 1), self.cache.kv_format
        text = (x[first : position + 1] for x in (self.k, self.v))
        k, v = (form.decode(*form.encode(x), torch.float32).transpose(0, 1).unsqueeze(0) for x in text)
        q = self.q[position].float().view(1, self.heads, 1, self.size)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).flatten()


@pytest.mark.parametrize("cap", [0.5, 20.0])
def test_scores_are_scaled_and_capped(cap: float) -> None:
    stored = Stored(1, CHUNK + 20, (4, 2, 64), torch.float32)
    stored.write(0, 0, CHUNK + 5)
    found = stored.attend([0], [CHUNK], chain(5), scale=0.3, cap=cap)
    for node in (0, 4):
        q = stored.q[CHUNK + node].view(2, 2, 64)
        k, v = (x[: CHUNK + node + 1].transpose(0, 1) for x in (stored.k, stored.v))
        scores = cap * torch.tanh(q @ k.mT * 0.3 / cap)
        expected = (torch.softmax(scores, -1) @ v).flatten()
        torch.testing.assert_close(found[0, node], expected, atol=1e-5, rtol=1e-5)


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


@pytest.mark.parametrize(
    ("heads", "dtype", "window"),
    [
        ((4, 4, 64), torch.float32, None),
        ((4, 1, 96), torch.float32, 70),
        ((6, 2, 128), torch.float32, None),
        ((4, 2, 64), torch.bfloat16, None),
        ((20, 1, 16), torch.float32, 300),
    ],
)
def test_it_is_attention(heads: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    stored = Stored(2, CHUNK + 20, heads, dtype)
    starts = [5, CHUNK - 2]
    for row in range(2):
        stored.write(row, 0, starts[row] + 5)
    found = stored.attend([0, 1], starts, chain(5), window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for row, start in enumerate(starts):
        for node in (0, 4):
            expected = stored.oracle(start + node, window)
            torch.testing.assert_close(found[row, node].float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_rejected_value_that_is_not_finite_changes_nobody_else(value: float) -> None:
    """The root and the second of two siblings, whose tile reads the first one's value as well."""
    stored = Stored(1, 40, (4, 2, 64), torch.float32)
    stored.write(0, 0, 30, [*range(10), 10, 11, 11, *range(13, 30)])
    expected = stored.attend([0], [10], [-1, 0, 0])[0]
    stored.cache.values[
        0, stored.table.slots(torch.tensor([0], device=DEVICE), torch.tensor([[11]], device=DEVICE)).flatten()
    ] = value
    found = stored.attend([0], [10], [-1, 0, 0])[0]
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert found.isfinite().all()


def test_rows_of_one_node_read_their_own_queries() -> None:
    stored = Stored(3, 40, (4, 2, 64), torch.float32)
    starts = [5, 9, 30]
    for row, start in enumerate(starts):
        stored.write(row, 0, start + 1)
    found = stored.attend([0, 1, 2], starts, [-1])
    for row, start in enumerate(starts):
        torch.testing.assert_close(found[row, 0], stored.oracle(start, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [INT8, FP8, FORMATS["bfloat16"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_attention_over_what_is_stored(form: KVFormat, dtype: torch.dtype) -> None:
    stored = Stored(2, CHUNK + 20, (4, 2, 64), dtype, form)
    starts = [5, CHUNK - 2]
    for row in range(2):
        stored.write(row, 0, starts[row] + 5)
    found = stored.attend([0, 1], starts, chain(5))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for row, start in enumerate(starts):
        expected = stored.oracle(start + 4, None)
        torch.testing.assert_close(found[row, 4].float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "window", "form"),
    [
        (torch.float32, None, OWN), (torch.bfloat16, None, OWN), (torch.float32, 90, OWN), (torch.bfloat16, 90, OWN),
        (torch.bfloat16, None, INT8), (torch.bfloat16, 90, FP8),
    ],
)  # fmt: skip
def test_a_tokens_bits_are_its_own(dtype: torch.dtype, window: int | None, form: KVFormat) -> None:
    """Alone, in a chain, in a tree with gaps in its path, beside another row, with room for more keys."""
    stored = Stored(3, CHUNK + 40, (8, 2, 64), dtype, form)
    for start in (61, CHUNK - 3):
        stored.write(0, 0, start + 8)
        alone = [stored.attend([0], [start + i], [-1], window)[0, 0] for i in range(4)]
        assert not torch.isnan(torch.stack(alone)).any()
        row = stored.attend([0], [start], chain(7), window)[0]
        assert all(torch.equal(row[i], alone[i]) for i in range(4)), start
        # In the tree, the token at depth d lies wherever its node is.
        depths = depth(ancestors(torch.tensor([BUSH])))[0].tolist()
        for other in (1, 2):
            stored.write(other, 0, start)
            stored.write(other, start, len(BUSH), depths)
        bush = stored.attend([1, 2], [start, start - 20], BUSH, window)[0]
        for i, node in enumerate((0, 2, 4, 7)):
            assert torch.equal(bush[node], alone[i]), (start, node)
        some = stored.attend([1], [start], BUSH, window, nodes=3, spare=2 * CHUNK)[0]
        assert torch.equal(some[-1], alone[3])


def test_wide_spans_are_cut_into_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(1, 80, (4, 2, 16), torch.float32)
    stored.write(0, 0, 70)
    whole = stored.attend([0], [10], chain(40))
    monkeypatch.setattr("sametoken.kernels.triton.attention.WORKSPACE", 1)
    assert torch.equal(stored.attend([0], [10], chain(40)), whole)
