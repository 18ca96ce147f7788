"""Weight formats by their names for users."""

from __future__ import annotations

import torch

from sametoken.model.formats.base import WeightFormat
from sametoken.model.formats.int4 import Int4
from sametoken.model.formats.int8 import Int8

_ALL: tuple[WeightFormat, ...] = (
    Int8("int8", dynamic=True),
    Int8("int8_weight_only", dynamic=False),
    Int4("int4", group=32),
    Int4("int4_g128", group=128),
)
FORMATS: dict[str, WeightFormat] = {each.name: each for each in _ALL}


def least_bytes(name: str, dtype: torch.dtype) -> float:
    """Smallest size of a number of a weight in bytes, without its share of the scales; `dtype` is for "none"."""
    return dtype.itemsize if name == "none" else 0.5 if name.startswith("int4") else 1.0
