"""Integer products of GGUF's codes: the bits of plain torch with the same rounding of rows, near the exact product."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from native_checks import kernels, threads
from sametoken.kernels.cpu.library import Library
from sametoken.model.formats.bits import join_bits, split_bits
from sametoken.model.formats.coded import BITS, Code, Coded, joined
from sametoken.model.formats.coded_packing import move_outputs, selected

__all__ = ["kernels", "threads"]  # fixtures


class Case(NamedTuple):
    """A weight's codes, the inputs of a group, and whether scales have steps and offsets.

    `paired`: offsets of bytes have steps although scales have none.
    """

    code: Code
    group: int
    stepped: bool
    offset: bool
    paired: bool = False


CASES = {
    "Q4_0": Case(Code.INT4, 32, stepped=False, offset=False),
    "Q4_K": Case(Code.INT4, 32, stepped=True, offset=True),
    "Q5_K": Case(Code.INT5, 32, stepped=True, offset=True),
    "Q6_K": Case(Code.INT6, 16, stepped=True, offset=False),
    "Q5_0": Case(Code.INT5, 32, stepped=False, offset=False),
    "Q4_1": Case(Code.INT4, 32, stepped=False, offset=True, paired=True),
    "Q5_1": Case(Code.INT5, 32, stepped=False, offset=True, paired=True),
    "Q8_0": Case(Code.INT8, 32, stepped=False, offset=False),
    "IQ4_XS": Case(Code.INT8, 32, stepped=True, offset=False),
    "Q4_K and Q6_K": Case(Code.INT6, 16, stepped=True, offset=True),
    "Q6_K and Q8_0": Case(Code.INT8, 16, stepped=False, offset=True),
}


def weight_of(case: Case, outputs: int, inputs: int) -> Coded:
    """Every code, an output of the greatest alone, and steps of eight groups."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    groups, bits = inputs // case.group, BITS[case.code]
    codes = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8, generator=generator)
    codes[0] = 128 if bits == 8 else 255  # sums as large as they get
    if not case.stepped:
        scale = torch.rand(outputs, groups, generator=generator).to(torch.float16)
        offset = torch.rand(outputs, groups, generator=generator) * 8 if case.offset else None
        offset_step = offset.to(torch.float16) if case.paired and offset is not None else None
        return Coded(
            case.code, codes.view(torch.int8) if bits == 8 else codes, scale, inputs, case.group,
            offset=torch.full((outputs, groups), -1, dtype=torch.int8) if case.paired else offset,
            offset_step=offset_step, block_rows=True,
        )  # fmt: skip
    steps = (torch.rand(2, outputs, inputs // 128, generator=generator) / 64).to(torch.float16)
    scale, offset = torch.randint(0, 64, (2, outputs, groups), dtype=torch.int8, generator=generator)
    codes = codes.view(torch.int8) if bits == 8 else codes
    return Coded(
        case.code, codes, scale, inputs, case.group, step=steps[0], offset=offset if case.offset else None,
        offset_step=steps[1] if case.offset else None, block_rows=True,
    )  # fmt: skip


def rows_of(count: int, inputs: int) -> Tensor:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    x[1] = 0
    x[2], x[3] = -3.0, 3.0  # bytes of -127 and of 127
    x[3, :32] = 1e-38  # too small for a byte's scale
    x[4] *= torch.logspace(-6, 6, inputs).to(torch.bfloat16)
    return x


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(40, 128), (100, 1280)])
def test_products_have_the_bits_of_plain_torch(kernels: Library, name: str, shape: tuple[int, int]) -> None:
    weight, bias = weight_of(CASES[name], *shape), torch.randn(shape[0]).bfloat16()
    x = rows_of(17, shape[1])
    found, meant = kernels.linear(weight.pack(bias), x, torch.float32), weight.linear(x)
    assert meant.dtype == torch.float32
    assert torch.equal(found, meant + bias)
    for count in (1, 2, 3, 5, 8, 9, 16):
        assert torch.equal(kernels.linear(weight.pack(bias), x[:count], torch.float32), found[:count]), count


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(40, 128), (100, 1280)])
def test_token_vectors_have_the_bits_of_dequantize(kernels: Library, name: str, shape: tuple[int, int]) -> None:
    weight = weight_of(CASES[name], *shape)
    index = torch.arange(shape[0]).flip(0)
    assert torch.equal(kernels.rows(weight.pack(None), index), weight.dequantize().to(torch.bfloat16)[index])


@pytest.mark.parametrize("name", CASES)
def test_only_the_rounding_of_rows_is_lost(name: str) -> None:
    weight = weight_of(CASES[name], 64, 512)
    x = rows_of(9, 512)
    exact = x.double() @ weight.dequantize().double().t()
    blocks = x.double().view(9, -1, 32)
    half_step = blocks.abs().amax(2, keepdim=True) / 254  # of a byte's scale
    size = half_step.expand_as(blocks).reshape(9, -1) @ weight.dequantize().double().abs().t()
    added = 1e-5 * (x.double().abs() @ weight.dequantize().double().abs().t())  # float32's own, of sums and offsets
    assert ((weight.linear(x) - exact).abs() <= 1.01 * size + added).all()
    norm = (weight.linear(x) - exact).norm() / exact.norm()
    assert 1e-4 < norm < 2e-2  # about 1 / 254 of the greatest of 32 numbers


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so(kernels: Library, bad: float) -> None:
    weight = weight_of(CASES["Q4_K"], 32, 256)
    x = rows_of(9, 256)
    x[5, 40] = bad
    found = kernels.linear(weight.pack(None), x, torch.float32)
    assert found[5].isnan().all()
    assert found[[0, 1, 2, 3, 4, 6, 7, 8]].isfinite().all()


def test_exact_rows_where_blocks_do_not_fit_or_are_not_asked_for() -> None:
    weight = weight_of(CASES["Q6_K"], 32, 256)
    x = rows_of(5, 256)
    exact = x.double() @ weight.dequantize().double().t()
    assert (weight.linear(x.float()) - exact).abs().max() < 1e-5 * exact.abs().max()
    plain = replace(weight, block_rows=False)
    assert (plain.linear(x) - exact).abs().max() < 2**-7 * exact.abs().max()


def test_exact_products_of_five_and_six_bits(kernels: Library) -> None:
    for name in ("Q5_K", "Q6_K"):
        weight = replace(weight_of(CASES[name], 48, 256), block_rows=False)
        x = torch.randn(5, 256).bfloat16()
        exact = x.double() @ weight.dequantize().double().t()
        found = kernels.linear(weight.pack(None), x, torch.float32)
        assert ((found - exact).abs() <= 5e-6 * (x.double().abs() @ weight.dequantize().double().abs().t())).all()


def test_weights_of_different_types_are_one_without_loss(kernels: Library) -> None:
    parts = [weight_of(CASES[name], 48, 512) for name in ("Q4_K", "Q5_K", "Q6_K")]
    whole = joined(parts)
    assert whole.code is Code.INT6
    assert whole.rounds_blocks
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    x = rows_of(6, 512)
    assert torch.equal(kernels.linear(whole.pack(None), x, torch.float32), whole.linear(x))


@pytest.mark.parametrize("bits", [5, 6])
def test_bits_are_joined_and_split(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 96), dtype=torch.uint8)
    packed = join_bits(codes, bits)
    assert packed.shape == (3, 96 * bits // 8)
    assert torch.equal(split_bits(packed, bits), codes)


@pytest.mark.parametrize("name", CASES)
def test_selected_outputs_have_the_bits_of_the_whole(kernels: Library, name: str) -> None:
    """Blocks move with their scales, steps and offsets, and are not rounded again."""
    weight = weight_of(CASES[name], 40, 256).pack(torch.randn(40).bfloat16())
    x = torch.randn(5, 256).bfloat16()
    whole = kernels.linear(weight, x, torch.float32)
    for ids in ([0], [39], [7, 8, 9], [*range(1, 40, 2), 0], [*range(16, 40)]):
        part = selected(weight, torch.tensor(ids))
        assert torch.equal(kernels.linear(part, x, torch.float32), whole[:, ids])
        assert part.nbytes < weight.nbytes
        move_outputs(weight, torch.tensor([5]), part, torch.tensor([len(ids) - 1]))
        assert torch.equal(kernels.linear(part, x, torch.float32), whole[:, [*ids[:-1], 5]])
