"""Crossed parameters of a test: `make test` runs a diagonal of them, `make test-thorough` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of one value of each axis; marked as thorough but for a diagonal, which has every value."""
    lists = [list(axis) for axis in axes]
    longest = max(map(len, lists))
    diagonal = {tuple(place % len(axis) for axis in lists) for place in range(longest)}
    places = itertools.product(*(range(len(axis)) for axis in lists))
    return [
        pytest.param(*(axis[i] for axis, i in zip(lists, place, strict=True)), marks=mark(place in diagonal))
        for place in places
    ]


def mark(quick: bool) -> Any:
    """The marks of a parameter that `make test` runs, or leaves to `make test-thorough`."""
    return () if quick else pytest.mark.thorough
