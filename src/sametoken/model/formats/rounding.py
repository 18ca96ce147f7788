"""Plain weights rounded to formats of other tools, by their names for users.

Scales of four-bit codes are searched: those of least squared error, weighted by the mean squared inputs of calibration.
Eight-bit formats map the greatest weight of a row to the greatest code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.errors import UnsupportedModelError
from sametoken.model.formats.coded import Code, Coded
from sametoken.model.formats.int4 import nearest_int4, searched_int4
from sametoken.model.formats.search import best_scale, scaled

GREATEST_FP8, GREATEST_FP4 = 448.0, 6.0
# Scales that are tried, relative to the one that maps a group's greatest weight to the greatest code.
TRIED_FP4 = (1.5, 1.2, 1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8)  # with 1.5 the greatest becomes 4
TRIED_INT4 = tuple(1.16 - step / 25 for step in range(12))
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1
ROUNDING = 1 << 21  # half of the last bit of such a mantissa, in the bits of a float32


class Rounding(NamedTuple):
    """Quantiser of a weight [out, in] in float32 to a format.

    Attributes:
        round: function of the weight, the group size, and the mean squared inputs [in] or None.
        group: number of inputs that share a scale, which divides the inputs; None for a whole row.
        bits: bits of a code.
    """

    round: Callable[[Tensor, int, Tensor | None], Coded]
    group: int | None
    bits: int

    def __call__(self, weight: Tensor, importance: Tensor | None = None) -> Coded:
        """Round `weight` to the nearest values of the format.

        Raises:
            UnsupportedModelError: the number of inputs is not a multiple of the group size.
        """
        inputs = weight.shape[1]
        if inputs % (self.group or 8):
            raise UnsupportedModelError(f"{inputs} inputs, expected a multiple of {self.group or 8}")
        wide = weight.to(torch.float32)
        return self.round(wide, self.group or inputs, None if importance is None else importance.to(torch.float32))


def _in_groups(weight: Tensor, group: int, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight as [out, groups, size], and the importance as [groups, size]."""
    return weight.view(weight.shape[0], -1, group), None if importance is None else importance.view(-1, group)


def _positive(scale: Tensor) -> Tensor:
    """Scales with 1 in place of 0, which only weights of zero have."""
    return torch.where(scale > 0, scale, 1.0)


def _row_scale(weight: Tensor, greatest: float) -> Tensor:
    """Scale of each row, [out, 1] bfloat16, to which readers that compute in bfloat16 round scales anyway."""
    return _positive(weight.abs().amax(1, keepdim=True) / greatest).to(torch.bfloat16)


def _fp8(weight: Tensor, group: int, importance: Tensor | None) -> Coded:
    scale = _row_scale(weight, GREATEST_FP8)
    codes = (weight / scale).clamp_(-GREATEST_FP8, GREATEST_FP8).to(torch.float8_e4m3fn)
    return Coded(Code.FP8, codes, scale, weight.shape[1], group)


def _int8(weight: Tensor, group: int, importance: Tensor | None) -> Coded:
    """W8A8: products round their rows too."""
    scale = _row_scale(weight, 127)
    codes = (weight / scale).round_().clamp_(-127, 127).to(torch.int8)
    return Coded(Code.INT8, codes, scale, weight.shape[1], group, dynamic=True)


def _int4(weight: Tensor, group: int, importance: Tensor | None) -> Coded:
    """Four bits, with scales above zero in bfloat16."""
    grouped, important = _in_groups(weight, group, importance)

    def tried(part: Tensor) -> Iterator[Tensor]:
        greatest = _positive(part.abs().amax(2, keepdim=True) / 8)
        return ((greatest * factor).to(torch.bfloat16).to(torch.float32) for factor in TRIED_INT4)

    scale = best_scale(grouped, tried, nearest_int4, important)
    codes = nearest_int4(scaled(grouped, scale))
    return Coded(Code.INT4, _nibbles(codes + 8), scale.squeeze(2).to(torch.bfloat16), weight.shape[1], group)


def _q4_0(weight: Tensor, group: int, importance: Tensor | None) -> Coded:
    """Four bits, with scales of either sign in float16: the greatest weight may become -8."""
    grouped, important = _in_groups(weight, group, importance)
    codes, scale = searched_int4(grouped, torch.float16, important)
    return Coded(Code.INT4, _nibbles(codes + 8), scale, weight.shape[1], group)


def _q8_0(weight: Tensor, group: int, importance: Tensor | None) -> Coded:
    grouped, _ = _in_groups(weight, group, None)
    scale = (grouped.abs().amax(2, keepdim=True) / 127).to(torch.float16)
    codes = scaled(grouped, scale.to(torch.float32)).round_().clamp_(-127, 127).to(torch.int8)
    return Coded(Code.INT8, codes.flatten(1), scale.squeeze(2), weight.shape[1], group)


def _nvfp4(weight: Tensor, group: int, importance: Tensor | None) -> Coded:
    """FP4 with E4M3 scales of groups, times one float32 that maps the greatest weight of all to the greatest scale."""
    grouped, important = _in_groups(weight, group, importance)
    factor = _positive(weight.abs().amax() / (GREATEST_FP4 * GREATEST_FP8))

    def stored(scale: Tensor) -> Tensor:
        return (scale / factor).clamp(max=GREATEST_FP8).to(torch.float8_e4m3fn)

    def tried(part: Tensor) -> Iterator[Tensor]:
        greatest = part.abs().amax(2, keepdim=True) / GREATEST_FP4
        return (stored(greatest * each).to(torch.float32) * factor for each in TRIED_FP4)

    scale = best_scale(grouped, tried, nearest_fp4, important)
    codes = _fp4_codes(scaled(grouped, scale))
    return Coded(
        Code.FP4,
        codes,
        stored(scale).squeeze(2),
        weight.shape[1],
        group,
        factor=factor.expand(len(weight)).contiguous(),
    )


def _mxfp4(weight: Tensor, group: int, importance: Tensor | None) -> Coded:
    """FP4 with scales that are powers of two."""
    grouped, important = _in_groups(weight, group, importance)

    def tried(part: Tensor) -> Iterator[Tensor]:
        needed = (part.abs().amax(2, keepdim=True) / GREATEST_FP4).log2().ceil_().clamp_(-126, 127)
        return (torch.exp2((needed + step).clamp_(-126, 127)) for step in (0, -1))

    scale = best_scale(grouped, tried, nearest_fp4, important)
    codes = _fp4_codes(scaled(grouped, scale))
    exponent = (scale.squeeze(2).log2() + 127).to(torch.uint8)
    return Coded(Code.FP4, codes, exponent.view(torch.float8_e8m0fnu), weight.shape[1], group)


def nearest_fp4(x: Tensor) -> Tensor:
    """Nearest E2M1 values of the numbers of `x`, in float32: from 1 on a number keeps one bit of its mantissa."""
    limited = x.clamp(-GREATEST_FP4, GREATEST_FP4)
    kept = (limited.view(torch.int32) + ROUNDING & ~(2 * ROUNDING - 1)).view(torch.float32)
    return torch.where(limited.abs() < 1, (limited * 2).round_().div_(2), kept)


def _fp4_codes(x: Tensor) -> Tensor:
    value = nearest_fp4(x)
    size = torch.bucketize(value.abs(), torch.tensor(FP4_VALUES, device=x.device), out_int32=True)
    return _nibbles(size + 8 * (value < 0))


def _nibbles(codes: Tensor) -> Tensor:
    """Pack codes 0 .. 15 [out, groups, size] into [out, in / 2] uint8, an even input in the low four bits."""
    flat = codes.flatten(1).to(torch.uint8)
    return flat[:, 0::2] | flat[:, 1::2] << 4


def rounding_of(name: str, group: int | None = None) -> Rounding:
    """Format from ROUNDINGS; `group` is for formats with a choice of it."""
    found = ROUNDINGS[name]
    return found if group is None else found._replace(group=group)


ROUNDINGS: dict[str, Rounding] = {
    "fp8": Rounding(_fp8, None, 8),
    "nvfp4": Rounding(_nvfp4, 16, 4),
    "mxfp4": Rounding(_mxfp4, 32, 4),
    "int8": Rounding(_int8, None, 8),
    "int4": Rounding(_int4, 128, 4),
    "gguf-q8_0": Rounding(_q8_0, 32, 8),
    "gguf-q4_0": Rounding(_q4_0, 32, 4),
}
