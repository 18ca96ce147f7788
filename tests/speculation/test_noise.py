"""The noise is exponential, uncorrelated between neighbours, and a function of (seed, position, token) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sametoken.speculation.noise import _hash, choice_seed, noise, wrap64

MASK = 2**64 - 1


def reference_hash(seed: int, position: int, token: int) -> int:
    """The definition in unbounded integers, unsigned 32-bit result."""

    def mix(x: int) -> int:
        x &= MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    key = mix(mix(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
    h = token ^ (key & 0xFFFFFFFF)
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h ^= key >> 32
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ (h >> 16)


def grid(seeds: torch.Tensor, positions: torch.Tensor, tokens: int) -> np.ndarray:
    """[seeds, positions, tokens] variates as float64."""
    rows = torch.cartesian_prod(seeds, positions)
    values = noise(rows[:, 0], rows[:, 1], torch.arange(tokens))
    return values.view(len(seeds), len(positions), tokens).double().numpy()


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 2**31 - 1))
def test_hash_is_its_definition(seed: int, position: int, token: int) -> None:
    got = _hash(torch.tensor([wrap64(seed)]), torch.tensor([position]), torch.tensor([token])).item()
    assert got & 0xFFFFFFFF == reference_hash(seed, position, token)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**31 - 1))
def test_noise_is_the_exponential_quantile_of_the_hash(seed: int, position: int, token: int) -> None:
    got = noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token])).double().item()
    uniform = (reference_hash(seed, position, token) + 0.5) * 2.0**-32
    # float32 is coarse near u = 1, where E is large and loses; where E is small and wins, it must be fine.
    assert -np.expm1(-got) == pytest.approx(uniform, abs=1.1 * 2.0**-24)
    if uniform < 0.5:
        assert got == pytest.approx(-np.log1p(-uniform), rel=1e-6)


def test_golden_values_never_change() -> None:
    seed = torch.tensor([0, 1, -1, 2**63 - 1])
    position = torch.tensor([0, 17, 4096, 10**9])
    got = _hash(seed, position, torch.tensor([0, 1, 31999, 151935]))
    assert got.tolist() == GOLDEN
    expected = torch.tensor(GOLDEN_NOISE)
    torch.testing.assert_close(noise(seed, position, torch.tensor([0, 151935])), expected, rtol=1e-6, atol=0)


def test_exponential_by_kolmogorov_smirnov_and_chi_square() -> None:
    values = grid(torch.arange(40), torch.arange(25), 1000).ravel()
    assert stats.kstest(values, "expon").pvalue > 1e-4
    counts = np.histogram(-np.expm1(-values), bins=4096, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-4
    # The smallest values decide draws: the lowest thousandth must be uniform in its own right.
    lowest = values[values < 1e-3]
    assert stats.kstest(-np.expm1(-lowest) / -np.expm1(-1e-3), "uniform").pvalue > 1e-4


def test_extremes_are_positive_and_finite() -> None:
    values = noise(torch.arange(200), torch.zeros(200, dtype=torch.int64), torch.arange(100_000))
    assert 2**-33 <= values.min().item() < 1e-6
    assert 14 < values.max().item() < 16.7


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("step", [1, 2, 8])
def test_neighbours_are_independent(axis: int, step: int) -> None:
    values = grid(torch.arange(-48, 48), torch.arange(96), 96)
    first = np.moveaxis(values, axis, 0)[:-step].ravel()
    second = np.moveaxis(values, axis, 0)[step:].ravel()
    # Rank correlation sees more than the linear one; a contingency table sees dependence without correlation.
    limit = 5 / np.sqrt(len(first))
    assert abs(np.corrcoef(first, second)[0, 1]) < limit
    assert abs(np.corrcoef(np.exp(-first), np.exp(-second))[0, 1]) < limit
    table = np.histogram2d(np.exp(-first), np.exp(-second), bins=8, range=((0, 1), (0, 1)))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-5


def test_far_apart_seeds_and_positions_share_no_noise() -> None:
    """Keys that differ in one bit anywhere give unrelated rows, not shifted or permuted ones."""
    seeds = torch.tensor([0] + [wrap64(1 << bit) for bit in range(64)])
    hashes = _hash(seeds, torch.full((65,), 5), torch.arange(4096))
    assert len(set(hashes.flatten().tolist())) > hashes.numel() * 0.9999
    bits = (hashes[1:] ^ hashes[0]).unsqueeze(-1).bitwise_right_shift(torch.arange(32, dtype=torch.int32)) & 1
    assert (bits.float().mean(dim=(1,)) - 0.5).abs().max() < 6 * 0.5 / 64


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_values_do_not_depend_on_company_or_order(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    columns = data.draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    position = torch.randint(0, 100_000, (rows,), generator=generator)
    tokens = torch.randint(0, 200_000, (rows, columns), generator=generator)
    together = noise(seed, position, tokens)
    order = torch.randperm(columns, generator=generator)
    assert torch.equal(noise(seed.flip(0), position.flip(0), tokens.flip(0)[:, order]), together.flip(0)[:, order])
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    alone = noise(seed[row : row + 1], position[row : row + 1], tokens[row, column : column + 1])
    assert alone.item() == together[row, column].item()


def test_choice_seeds_are_distinct_and_the_first_is_the_request_s_own() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(2**64 + 7, 0) == 7
    assert choice_seed(-1, 3) == choice_seed(2**64 - 1, 3)
    seeds = {choice_seed(seed, choice) for seed in range(-50, 50) for choice in range(100)}
    assert len(seeds) == 100 * 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


GOLDEN = [
    [-1679112305, -1768731925, -324768833, -479797201],
    [709008909, 776365807, 1927234244, -222779727],
    [-329046252, -1426179201, 1447850311, -1600360065],
    [56024270, 1706122028, 2059217824, 1349963280],
]
GOLDEN_NOISE = [
    [0.93917876, 2.1918356],
    [0.18041816, 2.9590161],
    [2.5690007, 0.9872154],
    [0.01312999, 0.37733376],
]
