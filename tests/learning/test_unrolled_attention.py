"""Attention of unrolled heads against dense attention with the mask written out, gradients in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sametoken.learning import attention
from sametoken.learning.attention import UnrolledAttention


def dense(queries: list[Tensor], keys: list[Tensor], values: list[Tensor], lengths: list[int], window: int | None):
    """The last step's output by one softmax over all keys of all steps, T times as many as there are slots."""
    step, slots = len(queries) - 1, queries[0].shape[0]
    groups = queries[0].shape[1] // keys[0].shape[1]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(slots)
    visible = []
    for s in range(step + 1):
        position = at + s
        seen = at.unsqueeze(1) >= at if s == 0 else at.unsqueeze(1) == at
        seen = seen & (document.unsqueeze(1) == document)
        if window is not None:
            seen = seen & ((at + step).unsqueeze(1) - position < window)
        visible.append(seen)
    mask = torch.cat(visible, dim=1)
    k, v = (torch.cat(each).repeat_interleave(groups, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries[-1], k) / queries[0].shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def run(attend: UnrolledAttention, inputs, window: int | None = None) -> list[Tensor]:
    """The outputs of all steps of one layer."""
    found = []
    for attend.step, (q, k, v) in enumerate(zip(*inputs, strict=True)):
        found.append(attend(q, k, v, 0, window))
    return found


def inputs(steps: int, slots: int, heads: tuple[int, int], seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(slots, h, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(steps)]
        for h in (heads[0], heads[1], heads[1])
    ]


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_outputs_and_gradients_equal_dense_attention(heads, window, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_TILE", 4)  # several tiles per document, and short documents together
    attention._ahead.cache_clear()
    lengths, steps = [9, 1, 4, 6, 3, 4], 4
    queries, keys, values = inputs(steps, sum(lengths), heads)
    attend = UnrolledAttention(lengths)
    ours = run(attend, (queries, keys, values), window)
    expected = [dense(queries[:n], keys[:n], values[:n], lengths, window) for n in range(1, steps + 1)]
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    weight = torch.randn(expected[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [*queries, *keys, *values]
    total = [sum((step * weight * (i + 1)).sum() for i, step in enumerate(each)) for each in (ours, expected)]
    gradients = [torch.autograd.grad(value, leaves) for value in total]
    attention._ahead.cache_clear()
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


def test_layers_do_not_share_keys():
    queries, keys, values = inputs(2, 5, (2, 1))
    attend = UnrolledAttention([5])
    first = attend(queries[0], keys[0], values[0], 0, None)
    other = attend(queries[1], keys[1], values[1], 1, None)  # the same step, another layer
    torch.testing.assert_close(first, dense(queries[:1], keys[:1], values[:1], [5], None))
    torch.testing.assert_close(other, dense(queries[1:], keys[1:], values[1:], [5], None))


def test_bfloat16_is_near_float64():
    queries, keys, values = inputs(3, 40, (4, 2))
    attend = UnrolledAttention([25, 15])
    narrow = [[x.detach().bfloat16() for x in each] for each in (queries, keys, values)]
    got = run(attend, narrow)[-1]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), dense(queries, keys, values, [25, 15], None), atol=0.05, rtol=0.05)


def saved_bytes(steps: int, slots: int) -> int:
    """Bytes of distinct tensors that autograd keeps for the backward of so many steps."""
    queries, keys, values = inputs(steps, slots, (4, 2))
    attend = UnrolledAttention([slots])
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run(attend, (queries, keys, values))
    del outputs
    return sum(kept.values())


def test_memory_grows_linearly_in_steps_and_in_slots():
    one, two, three = (saved_bytes(steps, 64) for steps in (2, 4, 6))
    assert two - one == three - two
    assert 2 * saved_bytes(3, 32) == saved_bytes(3, 64)
