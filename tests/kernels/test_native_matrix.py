"""Products by the matrix unit against the arithmetic of the processor's manual, and against products without it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from native_checks import built, threads, use
from sametoken.kernels.cpu import library as library_module
from sametoken.kernels.cpu import variant as native
from sametoken.kernels.cpu.library import Library
from sametoken.model.formats.names import FORMATS
from sametoken.model.formats.packing import pack_bfloat16

__all__ = ["threads"]  # a fixture

LINE = 32  # inputs of a row that the unit adds up before it adds to what was there
COUNTS = (1, 2, 3, 4, 5, 6, 15, 16, 17, 31, 32, 33, 37, 48, 65)


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = built("amx")
    if found is None:
        pytest.skip("this processor has no matrix unit that the kernels know")
    return use(found, monkeypatch)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stated(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T as Intel's manual states TDPBF16PS: of each 32 inputs the even ones, the odd ones, then both, in float32.

    A product of two bfloat16 numbers is exact in float32; a double holds its sum with another number of its range.
    """
    wide = -x.shape[1] % LINE
    left, right = (np.pad(each.float().numpy(), ((0, 0), (0, wide))).astype(np.float64) for each in (x, weight))
    sums = np.zeros((len(left), len(right)), np.float32)
    for begin in range(0, left.shape[1], LINE):
        halves = []
        for half in range(2):
            part = np.zeros_like(sums)
            for k in range(begin + half, begin + LINE, 2):
                part = (part + left[:, k, None] * right[:, k]).astype(np.float32)
            halves.append(part)
        sums += halves[0] + halves[1]
    return torch.from_numpy(sums)


@pytest.mark.parametrize("shape", [(16, 32), (33, 260), (100, 200), (512, 128), (80, 1536)])
def test_sums_are_those_of_the_manual(unit: Library, shape: tuple[int, int]) -> None:
    weight, x = randn(*shape, seed=1), randn(65, shape[1])
    packed, expected = pack_bfloat16(weight, None), stated(x, weight)
    for count in COUNTS:
        assert torch.equal(unit.linear(packed, x[:count], torch.float32), expected[:count]), count


def test_many_rows_are_multiplied_panel_by_panel(unit: Library) -> None:
    """600 rows are more than are multiplied at once, and 4224 inputs are more than stay in a first-level cache."""
    weight, x = randn(48, 4224, seed=1), randn(600, 4224)
    packed = pack_bfloat16(weight, randn(48, seed=2))
    whole = unit.linear(packed, x, torch.float32)
    parts = [unit.linear(packed, x[i : i + 3], torch.float32) for i in range(0, 600, 3)]
    assert torch.equal(whole, torch.cat(parts))


def test_numbers_below_the_normal_range_count_as_zero_with_and_without_tiles(unit: Library) -> None:
    """Inputs, products and sums that are that small: the least normal number is 2^-126."""
    power = torch.randint(-66, -60, (80, 256), generator=torch.Generator().manual_seed(3))
    numbers = (randn(80, 256).float() * 2.0**power).bfloat16()
    numbers[:, ::5] = torch.tensor(2.0**-130).bfloat16()  # below the range of bfloat16 itself
    x, packed = numbers[:40], pack_bfloat16(numbers[40:], None)
    whole = unit.linear(packed, x, torch.float32)
    few = torch.cat([unit.linear(packed, x[i : i + 4], torch.float32) for i in range(0, 40, 4)])
    assert torch.equal(whole, few)
    assert (whole == 0).any()
    assert whole[whole != 0].abs().min() >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("shape", [(16, 64), (100, 200), (512, 128), (80, 1536)])
def test_integers_have_the_bits_of_plain_torch_for_any_number_of_rows(unit: Library, shape: tuple[int, int]) -> None:
    rule, x = FORMATS["int8"], randn(300, shape[1])
    x[7] = 0
    weight, bias = randn(*shape, seed=1), randn(shape[0], seed=2)
    expected, packed = rule.linear(x, rule.quantise(weight)) + bias.float(), rule.pack(weight, bias)
    for count in (*COUNTS, 300):
        assert torch.equal(unit.linear(packed, x[:count], torch.float32), expected[:count]), count


def test_rows_that_are_not_finite_leave_their_neighbours_alone(unit: Library) -> None:
    weight, x = randn(64, 256, seed=1), randn(20, 256)
    packed = pack_bfloat16(weight, None)
    clean = unit.linear(packed, x, torch.float32)
    x[[2, 11]] = torch.tensor([float("nan"), float("inf")]).bfloat16().unsqueeze(1)
    found = unit.linear(packed, x, torch.float32)
    kept = [i for i in range(20) if i not in (2, 11)]
    assert torch.equal(found[kept], clean[kept])
    assert not found[[2, 11]].isfinite().any()


def test_a_unit_that_the_system_keeps_back_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if built("avx512") is None:
        pytest.skip("no kernels for AVX-512 were built for this machine")
    real = ctypes.CDLL

    class Refusing:
        def __init__(self, path: str) -> None:
            self.real, self.sametoken_matrix = real(path), lambda: 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    monkeypatch.setattr(library_module, "ctypes", SimpleNamespace(CDLL=Refusing, cast=ctypes.cast))
    monkeypatch.setattr(native, "processor_features", lambda: frozenset(native.VARIANTS["amx"]))
    monkeypatch.setenv(native.SWITCH, "auto")
    found, status = native.choose()
    assert found is not None
    assert (found.name, found.matrix, status.variant) == ("avx512", False, "avx512")
