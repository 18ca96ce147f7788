"""The unrolled forward against what serving computes: one chain after the other, over a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from head_makers import FLAGS, eagle_config, random_head
from sametoken.heads.eagle.module import EagleHead
from sametoken.learning.batch import Batch
from sametoken.learning.unroll import unroll
from sametoken.model.decoder import attend_in
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import chain_mask

LENGTHS, STEPS = (9, 2, 6), 4


def served(head: EagleHead, vectors: Tensor, features: Tensor, tokens: Tensor, slot: int) -> list[Tensor]:
    """What the output head reads at each step of a draft whose last certain slot is `slot`, tokens given."""
    layers = head.config.layers
    table = PageTable(1, 9, 8, 8, "cpu")
    table.extend(0, range(1, 9))
    cache = KVCache(layers.num_layers, layers.num_kv_heads, layers.head_dim, table, torch.float32, "cpu")
    table_of = vectors if head.embed is None else head.embed.weight

    def run(hidden: Tensor, start: int, following: Tensor) -> Tensor:
        count = len(following)
        span = Span(torch.tensor([0]), (0,), torch.tensor([start]), chain_mask(1, count), count, start + count)
        view = cache.view([span])
        return head(table_of[following], hidden, head.rotation(view.positions), attend_in(cache, view))

    output = run(head.fuse(features[: slot + 1]), 0, tokens[1 : slot + 2])[-1:]
    read = [head.normed(output)]
    for step in range(1, STEPS):
        if slot + 1 + step >= len(tokens):
            break
        output = run(head.recycle(output), slot + step, tokens[slot + 1 + step : slot + 2 + step])
        read.append(head.normed(output))
    return read


def problem(name: str) -> tuple[EagleHead, Tensor, Tensor, Batch]:
    head = random_head(eagle_config(**FLAGS[name]))
    generator = torch.Generator().manual_seed(1)
    documents = [(torch.randint(32, (n,), generator=generator), torch.ones(n, dtype=torch.bool)) for n in LENGTHS]
    width = 48 if head.config.version == 3 else 16
    vectors, features = (torch.randn(n, w, generator=generator) for n, w in ((32, 16), (sum(LENGTHS), width)))
    return head, vectors, features, Batch.of(documents)


@pytest.mark.parametrize("name", FLAGS)
def test_unrolled_equals_cached_step_by_step(name):
    head, vectors, features, batch = problem(name)
    with torch.no_grad():
        normed = unroll(head, vectors, features, batch, STEPS).normed
        compared = start = 0
        for length in LENGTHS:
            rows = slice(start, start + length)
            for slot in range(length - 1):
                expected = served(head, vectors, features[rows], batch.tokens[rows], slot)
                for step, wanted in enumerate(expected):
                    torch.testing.assert_close(normed[step, start + slot], wanted[0], atol=1e-5, rtol=1e-5)
                    compared += 1
            start += length
    assert compared > 40


@pytest.mark.parametrize("name", ["eagle3", "eagle3-layers", "eagle3-window", "eagle1"])
def test_recomputing_changes_no_gradient(name):
    head, vectors, features, batch = problem(name)
    gradients = []
    for recompute in (False, True):
        for parameter in head.parameters():
            parameter.requires_grad_(True)
        normed = unroll(head, vectors, features, batch, STEPS, recompute=recompute).normed
        weight = torch.randn(normed.shape, generator=torch.Generator().manual_seed(2))
        wanted = [parameter for parameter in head.parameters() if parameter is not getattr(head.head, "weight", None)]
        gradients.append(torch.autograd.grad((normed * weight).sum(), wanted))
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.abs().sum() > 0
        torch.testing.assert_close(plain, recomputed)


def kept_bytes(work: Callable[[], object], head: EagleHead) -> int:
    """Bytes of distinct activations that autograd keeps for the backward of `work`; weights are there anyway."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = work()
    for parameter in head.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del outputs
    return sum(kept.values())


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "eagle1"])
def test_a_further_step_keeps_no_more_than_one_layers_activations(name):
    head, vectors, features, batch = problem(name)
    head.requires_grad_(True)
    hidden = torch.randn(len(batch.tokens), 16, requires_grad=True)

    def causal(q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)

    def layer() -> Tensor:
        return head.normed(head(vectors[batch.tokens], hidden, head.rotation(batch.positions), causal))

    unrolled = [kept_bytes(partial(unroll, head, vectors, features, batch, steps), head) for steps in (2, 4, 6)]
    assert unrolled[1] - unrolled[0] == unrolled[2] - unrolled[1]
    assert (unrolled[2] - unrolled[1]) / 2 <= kept_bytes(layer, head)
