"""Weight formats by the names that users give them."""

from __future__ import annotations

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
