"""The compiled kernels of other tools' formats against their meaning in float64; bits do not depend on company."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from native_checks import kernels, threads, use
from sametoken.kernels.cpu.library import Library
from sametoken.model.formats.coded import Code, Coded
from sametoken.model.formats.coded_packing import selected
from sametoken.model.formats.names import FORMATS
from sametoken.model.linear import Embedding, Linear

__all__ = ["kernels", "threads"]  # fixtures

ALL = 1 << 20  # a group of all inputs


class Case(NamedTuple):
    """A weight's format; `zero` is the range of its zero points, `offset` the dtype of what is subtracted (GGUF)."""

    code: Code
    scale: torch.dtype
    group: int
    factor: bool = False
    zero: tuple[int, int] | None = None
    ordered: bool = False
    offset: torch.dtype | None = None


CASES = [
    Case(Code.FP8, torch.float32, ALL),
    Case(Code.FP8, torch.float32, 128),
    Case(Code.FP4, torch.float8_e4m3fn, 16, factor=True),
    Case(Code.FP4, torch.float8_e8m0fnu, 32),
    Case(Code.INT4, torch.float16, 128, zero=(0, 17)),
    Case(Code.INT4, torch.bfloat16, 32),
    Case(Code.INT4, torch.float32, 64, zero=(0, 17), ordered=True),
    Case(Code.INT4, torch.float16, ALL),
    Case(Code.INT8, torch.bfloat16, 32, zero=(-128, 128)),
    Case(Code.INT8, torch.float16, ALL, ordered=True),
    Case(Code.INT8, torch.float16, 32),
    Case(Code.INT8, torch.int8, 16),
    Case(Code.INT8, torch.int8, 32, offset=torch.float32),
    Case(Code.INT4, torch.int8, 32, offset=torch.int8),
]


def weight_of(case: Case, outputs: int, inputs: int) -> Coded:
    """Every code and every kind of scale, subnormal ones too."""
    torch.manual_seed(outputs + inputs)
    group = min(case.group, inputs)
    groups = -(-inputs // group)
    if case.code is Code.FP8:
        every = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
        codes = every[torch.randint(0, 254, (outputs, inputs))].view(torch.float8_e4m3fn)
    elif case.code is Code.INT8:
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    if case.scale == torch.int8:
        scale = torch.randint(-128, 128, (outputs, groups), dtype=torch.int8)
    elif case.scale.itemsize == 1:
        low, high = (0, 127) if case.scale == torch.float8_e4m3fn else (100, 150)
        scale = torch.randint(low, high, (outputs, groups), dtype=torch.uint8).view(case.scale)
    else:
        scale = (torch.rand(outputs, groups) * 10.0 ** torch.randint(-6, 1, (outputs, groups))).to(case.scale)
    zero = None if case.zero is None else torch.randint(*case.zero, (outputs, groups)).to(torch.int8)
    factor = torch.rand(outputs) if case.factor else None
    order = torch.randperm(inputs).to(torch.int32) if case.ordered else None
    steps = torch.rand(2, outputs, groups // 2 if groups % 2 == 0 else groups).to(torch.float16)
    offset = None if case.offset is None else torch.randint(0, 64, (outputs, groups)).to(case.offset)
    return Coded(
        case.code, codes, scale, inputs, group, factor, zero, order,
        step=steps[0] if case.scale == torch.int8 else None,
        offset=offset, offset_step=steps[1] if case.offset == torch.int8 else None,
    )  # fmt: skip


def product(kernels: Library, weight: Coded, bias: Tensor, x: Tensor) -> Tensor:
    return kernels.linear(weight.pack(bias), x, torch.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [(48, 128), (40, 96), (100, 448), (256, 1024)])
def test_products_are_those_of_what_is_stored(kernels: Library, case: Case, shape: tuple[int, int]) -> None:
    weight, bias = weight_of(case, *shape), torch.randn(shape[0]).bfloat16()
    meant = weight.dequantize().double()
    x = torch.randn(17, shape[1]).bfloat16()
    every = product(kernels, weight, bias, x)
    exact = x.double() @ meant.t() + bias.double()
    size = x.double().abs() @ meant.abs().t() + bias.double().abs()
    assert ((every - exact).abs() <= 5e-7 * size).all()  # a few units of float32's last place
    for count in (1, 2, 3, 5, 8, 9, 16):
        assert torch.equal(product(kernels, weight, bias, x[:count]), every[:count]), count


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_torch_computes_the_same(case: Case) -> None:
    weight = weight_of(case, 64, 256)
    x, meant = torch.randn(5, 256), weight.dequantize().double()
    size = x.double().abs() @ meant.abs().t()
    assert ((weight.linear(x) - x.double() @ meant.t()).abs() <= 2e-6 * size).all()  # sums of float32 in any order
    assert torch.equal(weight.linear(x)[:3], weight.linear(x[:3]))


SELECTIONS = ([0], [47], [3, 4, 5], [*range(1, 48, 3), 0], [*range(16, 48)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selected_outputs_have_the_bits_of_the_whole(kernels: Library, case: Case) -> None:
    """Tiles, scales, zero points, factors and biases move as they are; the order of inputs stays."""
    weight, x = weight_of(case, 48, 448).pack(torch.randn(48).bfloat16()), torch.randn(7, 448).bfloat16()
    whole = kernels.linear(weight, x, torch.float32)
    for ids in SELECTIONS:
        assert torch.equal(kernels.linear(selected(weight, torch.tensor(ids)), x, torch.float32), whole[:, ids])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selected_outputs_without_kernels(case: Case) -> None:
    weight = weight_of(case, 48, 448)
    whole, part = weight.dequantize(), weight.outputs(torch.tensor([3, 4, 5, 40, 47]))
    part.replace_outputs(torch.tensor([1, 4]), weight.outputs(torch.tensor([20, 3])))
    assert torch.equal(part.dequantize(), whole[[3, 20, 5, 40, 3]])


@pytest.mark.parametrize("name", ["none", *FORMATS])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("tied", [False, True])
def test_selected_layers_have_the_bits_of_the_whole(
    kernels: Library, monkeypatch: pytest.MonkeyPatch, name: str, compiled: bool, tied: bool
) -> None:
    """A layer of our formats, or the head of a tied embedding; the layer itself is unchanged."""
    if not compiled:
        use(None, monkeypatch)
    torch.manual_seed(1)
    plain, x = torch.randn(45, 192).bfloat16(), torch.randn(5, 192).bfloat16()
    layer: Linear | Embedding
    if tied:
        layer = Embedding(45, 192, torch.bfloat16, tied=True, format=FORMATS.get(name))
    else:
        layer = Linear(192, 45, True, torch.bfloat16, FORMATS.get(name))
        layer.bias = torch.nn.Parameter(torch.randn(45).bfloat16(), requires_grad=False)
    layer.weight = torch.nn.Parameter(plain, requires_grad=False)
    layer.pack()
    product = layer.project if isinstance(layer, Embedding) else layer
    whole = product(x)
    source = layer.whole_head if isinstance(layer, Embedding) else layer
    for ids in ([0], [44], [*range(1, 45, 3), 0]):
        part = source.selected(torch.tensor(ids))
        assert part.out_features == len(ids)
        assert torch.equal(part(x), whole[:, ids])
        part.replace_outputs(torch.tensor([0, len(ids) - 1]), source, torch.tensor([17, 17]))
        ids[0] = ids[-1] = 17
        assert torch.equal(part(x), whole[:, ids])
    assert torch.equal(product(x), whole)
