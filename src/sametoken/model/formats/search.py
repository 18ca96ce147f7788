"""Search of the scale of a group of weights: the candidate with the smallest rounding error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.cpu.threads import serial_torch
from sametoken.model.formats.base import UnpackedWeight

PART = 1 << 17  # numbers that a thread rounds at once: intermediate results stay in a core's own cache
SUMS = 8
CHUNK = 1 << 20  # numbers searched at once, so that candidates stay small compared to the weight

Nearest = Callable[[Tensor], Tensor]  # nearest values of codes to scaled weights, same shape


def rounded_by_rows(rounded: Callable[[Tensor], UnpackedWeight], weight: Tensor) -> UnpackedWeight:
    """Apply `rounded` to a weight [out, in] in parts of the outputs, one part per thread.

    Torch's threads would wait for each other after every operation, which takes several times as long on a busy
    machine.
    """
    parts = torch.split(weight, max(1, PART // weight.shape[1]))
    if weight.device.type != "cpu" or len(parts) == 1:
        return rounded(weight)
    with serial_torch() as threads, ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(rounded, parts))
    return UnpackedWeight(*(torch.cat(each) for each in zip(*found, strict=True)))


def best_scale(
    grouped: Tensor, tried: Callable[[Tensor], Iterable[Tensor]], nearest: Nearest, importance: Tensor | None = None
) -> Tensor:
    """Scale of least squared error for each group, the first of equal ones, [out, groups, 1] float32.

    Args:
        grouped: [out, groups, size] float32.
        tried: storable scales [rows, groups, 1], in float32, for some rows of `grouped`.
        importance: [groups, size] factors of the squared errors; None for 1.
    """
    if grouped.is_meta:  # a plan of memory needs the shape alone, and tens of thousands of tries take a minute
        return grouped.new_empty((*grouped.shape[:2], 1))
    rows = max(1, CHUNK // max(1, grouped[0].numel()))
    return torch.cat([_best(part, tried(part), nearest, importance) for part in torch.split(grouped, rows)])


def _best(grouped: Tensor, tried: Iterable[Tensor], nearest: Nearest, importance: Tensor | None) -> Tensor:
    best = grouped.new_full((*grouped.shape[:2], 1), float("inf"))
    found = torch.zeros_like(best)
    for scale in tried:
        error = nearest(scaled(grouped, scale)).mul_(scale).sub_(grouped).square_()
        cost = added(error if importance is None else error.mul_(importance))
        better = cost < best
        best, found = torch.where(better, cost, best), torch.where(better, scale, found)
    return found


def added(errors: Tensor) -> Tensor:
    """Sums [..., 1] over the last dimension, in eight running sums and then by halves, as the compiled kernels add."""
    parts = torch.split(F.pad(errors, (0, -errors.shape[-1] % SUMS)), SUMS, -1)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    while (width := total.shape[-1] // 2) > 0:
        total = total[..., :width] + total[..., width:]
    return total


def scaled(grouped: Tensor, scale: Tensor) -> Tensor:
    """Weights divided by their scales; a scale of zero counts as 1."""
    return grouped / torch.where(scale == 0, 1.0, scale)
