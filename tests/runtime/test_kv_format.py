"""What a cache stores: codes against plain Python, the error of rounding, and codes that no neighbour changes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.runtime.kv_format import FORMATS, FP8, INT8, KVFormat
from sametoken.speculation.draft import ancestors

CODED = {"int8": INT8, "fp8": FP8}


def vectors(*shape: int, seed: int = 0) -> Tensor:
    """Vectors of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.logspace(-6, 6, shape[0]).view(-1, *[1] * (len(shape) - 1))
    x[1] = 0
    return x.bfloat16()


def nearest_float8(x: float) -> float:
    """The nearest number of float8_e4m3fn, ties to an even last bit, by its definition."""
    exponent = max(math.frexp(x)[1] - 1, -6) if x else -6
    unit = 2.0 ** (exponent - 3)
    return math.copysign(round(x / unit) * unit, x)


@pytest.mark.parametrize("name", CODED)
def test_codes_are_those_of_the_definition(name: str) -> None:
    form, x = CODED[name], vectors(9, 16)
    codes, scale = form.encode(x)
    assert scale is not None
    assert codes.dtype == form.stored
    decoded = form.decode(codes, scale, torch.float32)
    for i, row in enumerate(x.float()):
        expected_scale = torch.tensor(max(float(row.abs().max() / form.greatest), 2.0**-100))
        assert scale[i] == expected_scale
        ratios = (row / expected_scale).tolist()
        nearest = [float(round(r)) if name == "int8" else nearest_float8(r) for r in ratios]
        assert torch.equal(decoded[i], torch.tensor(nearest) * expected_scale)
    assert torch.equal(decoded[1], torch.zeros(16)), "a vector of zeros stays one"
    error = (decoded - x.float()).norm(dim=-1) / x.float().norm(dim=-1).clamp(min=1e-30)
    assert error.max() < {"int8": 0.01, "fp8": 0.04}[name]


def test_numbers_are_stored_as_they_are() -> None:
    x = vectors(5, 8)
    codes, scale = FORMATS["auto"].encode(x)
    assert codes is x
    assert scale is None
    stored, _ = FORMATS["bfloat16"].encode(x.float())
    assert torch.equal(stored, x)
    assert FORMATS["fp8"] is FORMATS["fp8_e4m3"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_that_are_allocated(name: str, shared: bool) -> None:
    table = PageTable(1, 5, 4, 16, "cpu")
    form = FORMATS[name]
    sizes = (16, 32) if shared else (48,)
    shape = SimpleNamespace(num_layers=3, cached_heads=2, cached_parts=sizes, shared_values=shared)
    cache = KVCache.of(shape, table, torch.float32, "cpu", form)
    stored = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    parts = {part.data_ptr(): part for part in stored if part is not None}
    taken = sum(part.numel() * part.element_size() for part in parts.values())
    assert taken == 5 * KVCache.bytes_per_page(shape, 16, torch.float32, form)
    assert taken / (5 * 16 * 3 * 2 * (1 if shared else 2)) == {"auto": 192, "bfloat16": 96}.get(
        name, 48 + 4 * len(sizes)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_gives_back_what_is_stored(name: str) -> None:
    """Wherever a row lies: side by side, in scattered pages, as a tree; and after a commit."""
    form, parents = FORMATS[name], [-1, 0, 0, 1]
    table = PageTable(2, 200, 10, 4, "cpu")
    table.extend(0, [5, 6, 7])
    table.extend(1, [3, 9, 1])
    cache = KVCache(2, 2, 16, table, torch.float32, "cpu", form)
    keys, values = vectors(11, 2, 16).float(), vectors(11, 2, 16, seed=1).float()
    expected = [form.decode(*form.encode(x), torch.float32).transpose(0, 1) for x in (keys, values)]
    for row in (0, 1):
        table_rows, index = torch.tensor([row]), torch.arange(11).unsqueeze(0)
        cache.write(1, table.slots(table_rows, index).flatten(), keys, values)
        chain = Span(table_rows, [row], torch.tensor([0]), ancestors(torch.arange(-1, 10).unsqueeze(0)), 11, 11)
        tree = Span(table_rows, [row], torch.tensor([7]), ancestors(torch.tensor([parents])), 4, 11)
        straight, bush = (cache.view([span]).segments[0] for span in (chain, tree))
        assert (straight.first_slot is None) == (row == 1)
        for found, want in zip(cache.read(1, straight), expected, strict=True):
            assert torch.equal(found[0, :, :11], want)
        at = [*range(7), 7, 8, 10]  # the path 0, 1, 3
        for found, want in zip(cache.read(1, bush), expected, strict=True):
            assert torch.equal(found[-1, :, :10], want[:, at])
        cache.commit(table_rows, torch.tensor([7]), torch.tensor([[0, 1, 3]]))
        for found, want in zip(cache.read(1, straight), expected, strict=True):
            assert torch.equal(found[0, :, :10], want[:, at])


@pytest.mark.parametrize("form", CODED.values())
def test_parts_of_a_vector_are_rounded_apart(form: KVFormat) -> None:
    """A rotated key that is a thousand times as large as the latent beside it costs the latent no digit."""
    table = PageTable(1, 20, 10, 4, "cpu")
    table.extend(0, [5, 3, 9])
    shape = SimpleNamespace(num_layers=1, cached_heads=2, cached_parts=(8, 24), shared_values=True)
    cache = KVCache.of(shape, table, torch.float32, "cpu", form)
    key, latent = (torch.randn(9, 2, size, generator=torch.Generator().manual_seed(size)) for size in (8, 24))
    row, index = torch.tensor([0]), torch.arange(9).unsqueeze(0)
    cache.write(0, table.slots(row, index).flatten(), stored := torch.cat([1000 * key, latent], -1), stored)
    chain = Span(row, [0], torch.tensor([0]), ancestors(torch.arange(-1, 8).unsqueeze(0)), 9, 9)
    read = cache.read(0, cache.view([chain]).segments[0])[0][0, :, :9].transpose(0, 1)
    expected = [form.decode(*form.encode(part), torch.float32) for part in (1000 * key, latent)]
    assert torch.equal(read, torch.cat(expected, -1))
    assert (read[..., 8:] - latent).norm() < 0.04 * latent.norm()


@pytest.mark.parametrize("form", CODED.values())
def test_codes_do_not_depend_on_company(form: KVFormat) -> None:
    x = vectors(20, 3, 32)
    codes, scales = form.encode(x)
    assert scales is not None
    for i in range(20):
        for head in range(3):
            alone, scale = form.encode(x[i, head])
            assert torch.equal(alone, codes[i, head])
            assert torch.equal(torch.as_tensor(scale), scales[i, head])
