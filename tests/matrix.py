"""Crossed parameters of a test: `make test` runs as few as have each value once, `make test-thorough` the rest.

`crossed` makes such parameters. A test with parameters of several decorators and fixtures gets the mark `cover`.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
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


def cover(items: Iterable[pytest.Item]) -> None:
    """Marks as thorough, of each test with the mark `cover`, the cells whose every value another cell has."""
    cells: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("cover"):
            cells[item.path, item.cls, item.originalname].append(item)
    for each in cells.values():
        thin(each)


def thin(cells: list[pytest.Function]) -> None:
    """Leaves the mark off the fewest cells of one test that have each value, as far as a greedy choice finds them."""
    left = {
        id(cell): {(name, id(value)) for name, value in cell.callspec.params.items()}
        for cell in cells
        if not cell.get_closest_marker("thorough")
    }
    wanted, used = set().union(*left.values()), Counter[Any]()
    while wanted:
        best = max(left, key=lambda cell: (len(left[cell] & wanted), -sum(used[value] for value in left[cell])))
        used.update(left[best])
        wanted -= left.pop(best)
    for cell in cells:
        if id(cell) in left:
            cell.add_marker(pytest.mark.thorough)
