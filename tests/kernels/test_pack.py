"""Packing by the compiled library: the same bytes as what torch makes of a weight in several steps, part by part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from gguf_makers import STEPS
from native_checks import kernels
from sametoken.checkpoint.gguf import blocks as gguf_blocks
from sametoken.checkpoint.gguf.container import TYPES
from sametoken.checkpoint.quantised import layouts
from sametoken.kernels.cpu.library import BLOCK_KINDS
from sametoken.kernels.cpu.structures import FINITE_BF16
from sametoken.kernels.cpu.variant import library
from sametoken.model.formats import coded_packing, packing
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.int4 import Int4
from sametoken.model.formats.packing import TILE, WIDTH

__all__ = ["kernels"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread", "kernels")

BLOCK_TYPES = {each.name: each for each in TYPES.values()}
SHAPES = [(16, 128), (48, 256), (37, 72), (1, 8), (130, 1000)]


def padded(weight: Tensor, width: int = WIDTH) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % TILE))


def torch_pairs(weight: Tensor) -> Tensor:
    whole = padded(weight)
    return whole.view(-1, TILE, whole.shape[1] // 2, 2).transpose(1, 2)


def torch_quads(values: Tensor) -> Tensor:
    whole = (padded(values).to(torch.int16) + 128).to(torch.uint8)
    return whole.view(-1, TILE, whole.shape[1] // 4, 4).transpose(1, 2)


def torch_nibbles(values: Tensor) -> Tensor:
    whole = (padded(values).to(torch.int16) + 8).to(torch.uint8)
    low, high = whole.view(-1, TILE, whole.shape[1] // 8, 2, 4).unbind(3)
    return (low | (high << 4)).transpose(1, 2)


def torch_words(codes: Tensor) -> Tensor:
    first, second = padded(codes, WIDTH // 2).unflatten(1, (-1, 2, 2)).unbind(3)
    found = torch.cat([(first & 15) | (second << 4), (first >> 4) | (second & 240)], 2)
    return found.view(-1, TILE, found.shape[1], 4).transpose(1, 2)


def torch_fp8(codes: Tensor) -> Tensor:
    whole = padded(codes.view(torch.int8))
    return whole.view(-1, TILE, whole.shape[1] // 4, 2, 2).permute(0, 2, 1, 4, 3).flatten(3)


def signed(shape: tuple[int, int]) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


WAYS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], Callable[[tuple[int, int]], Tensor]]] = {
    "bfloat16": (packing.pairs, torch_pairs, lambda shape: torch.randn(shape).to(torch.bfloat16)),
    "int8 pairs": (packing.pairs, torch_pairs, signed),
    "int8": (packing.quads, torch_quads, signed),
    "int4": (coded_packing.words, torch_words, lambda shape: signed((shape[0], shape[1] // 2)).view(torch.uint8)),
    "fp8": (coded_packing.quads, torch_fp8, lambda shape: signed(shape).view(torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_packed_weight_has_the_bytes_that_torch_gives(way: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    pack, in_torch, make = WAYS[way]
    weight = make(shape)
    wanted = in_torch(weight).contiguous()
    assert torch.equal(pack(weight).view(torch.uint8), wanted.view(torch.uint8))
    turned = weight.view(torch.uint8).t().contiguous().t().view(torch.uint8)
    if weight.itemsize == 1:  # inputs that do not lie side by side
        assert torch.equal(pack(turned.view(weight.dtype)).view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("cuts", [(5,), (16, 17), (1, 40, 90)])
@pytest.mark.parametrize("way", WAYS)
def test_parts_below_each_other_are_one_weight(way: str, cuts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    pack, in_torch, make = WAYS[way]
    weight = make((100, 136))
    parts = torch.tensor_split(weight.view(torch.int8), cuts)
    packed = pack(*(part.view(weight.dtype) for part in parts))
    assert torch.equal(packed.view(torch.uint8), in_torch(weight).contiguous().view(torch.uint8))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_searched_int4_has_the_bytes_that_torch_gives(group: int, shape: tuple[int, int]) -> None:
    rule = Int4("int4", group)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight[0] = 0
    weight[-1] = (-1.0) ** torch.arange(shape[1])  # the greatest has either sign
    weight[len(weight) // 2] *= 2.0**-130  # below the range of bfloat16 itself
    weight[:, ::7] *= 9
    stored, kept = rule.quantise(weight), rule.pack(weight, None).parts
    scale = padded(stored.scale, 1).view(-1, TILE, stored.scale.shape[1]).transpose(1, 2)
    assert torch.equal(kept["scale"], scale)
    assert torch.equal(kept["data"], torch_nibbles(stored.values))
    across = weight.t().contiguous().t()  # inputs that do not lie side by side
    assert torch.equal(rule.pack(across, None).parts["data"], kept["data"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e8m0fnu])
def test_scales_lie_by_tile(dtype: torch.dtype) -> None:
    scale = torch.rand(37, 5).to(dtype)
    wanted = F.pad(scale.to(torch.float32), (0, 0, 0, 11)).view(3, 16, 5).transpose(1, 2)
    if dtype == torch.float8_e8m0fnu:  # which has no zero
        wanted[-1, :, 5:] = 2.0**-127
    assert torch.equal(coded_packing.by_group(scale).to(torch.float32), wanted.contiguous())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (36, 70), (20, 71)])
def test_numbers_that_are_not_finite_are_seen(bad: float, place: tuple[int, int]) -> None:
    weight = torch.full((37, 72), torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
    assert packing.pair_tiles(37, 72, torch.bfloat16).put(0, -weight, FINITE_BF16)
    weight[place] = bad
    assert not packing.pair_tiles(37, 72, torch.bfloat16).put(0, weight, FINITE_BF16)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_weights_of_llama_cpps_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = BLOCK_TYPES[kind].bytes
    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (7, 60, size), dtype=torch.uint8)
    inputs = 60 * BLOCK_TYPES[kind].numbers
    found = gguf_blocks.coded_blocks(kind, blocks, inputs)._tensors()
    monkeypatch.setattr(gguf_blocks, "library", lambda: None)
    wanted = gguf_blocks.coded_blocks(kind, blocks, inputs)._tensors()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("kind", gguf_blocks.KINDS)
def test_numbers_of_blocks_are_those_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, size = BLOCK_TYPES[kind].numbers, BLOCK_TYPES[kind].bytes
    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (37, 3, size), dtype=torch.uint8)
    own = {Type.Q4_1: (0, 2), Type.Q5_1: (0, 2), Type.MXFP4: (), Type.TQ1_0: (52,), Type.TQ2_0: (64,)}
    for at in {**STEPS, **own}.get(Type[kind], (0,)):  # finite scales
        blocks[:, :, at : at + 2] = torch.rand(37, 3, 1).to(torch.float16).view(torch.uint8)
    if Type[kind] == Type.NVFP4:
        blocks[:, :, :4] %= 127
    if Type[kind] == Type.IQ1_M:  # the greatest bits of the step lie in the last word
        blocks[:, :, 55] &= 63
    weight = gguf_blocks.coded_blocks(kind, blocks, 3 * numbers)
    found = torch.empty(weight.shape, dtype=torch.bfloat16)
    monkeypatch.setattr(Coded, "dequantize", lambda self: pytest.fail("torch dequantised"))
    weight.outputs(slice(5, 30)).dequantize_to(found[5:30])
    monkeypatch.undo()
    assert torch.equal(found[5:30].view(torch.int16), weight.dequantize().to(torch.bfloat16)[5:30].view(torch.int16))


@pytest.mark.parametrize("bad", [127, 255])
@pytest.mark.parametrize("place", [0, 5000, 2**19 + 2])
def test_fp8_codes_that_are_nan_are_seen(bad: int, place: int) -> None:
    codes = (torch.arange(2**19 + 3) % 127).to(torch.uint8)
    compiled = library()
    assert compiled is not None
    assert compiled.is_finite(codes | 128)
    codes[place] = bad
    assert not compiled.is_finite(codes)


@pytest.mark.parametrize(("inputs", "columns"), [(8, 1), (256, 16), (136, 37)])
def test_codes_of_awqs_words(inputs: int, columns: int) -> None:
    words = torch.randint(-(2**31), 2**31, (inputs, columns), dtype=torch.int32)
    compiled = library()
    assert compiled is not None
    assert torch.equal(compiled.awq_codes(words), layouts._halved(layouts._awq_nibbles(words)))
