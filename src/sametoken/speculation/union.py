"""Union of several draft trees of one row: equal tokens after equal paths are one node. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Union(NamedTuple):
    """Tree of N nodes of one row, united from the trees of P drafters.

    Attributes:
        tokens, parents: [N - 1] of all nodes but the root, parents before their children.
        said: [N] bit mask of the drafters that proposed each node: bit p for drafter p; the root has all bits.
        longest: [P] tokens on the longest path that each drafter proposed.
    """

    tokens: list[int]
    parents: list[int]
    said: list[int]
    longest: list[int]

    def parts(self, drafters: Sequence[str], path: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Longest path of each drafter, and the number of its draft tokens on `path` (nodes, root first)."""
        return {
            drafter: (self.longest[part], sum(self.said[node] >> part & 1 for node in path) - 1)
            for part, drafter in enumerate(drafters)
        }


def union(trees: Sequence[tuple[Sequence[int], Sequence[int]]], most: int) -> Union:
    """Unite the draft trees of one row by path.

    Args:
        trees: tokens and parents of each drafter's tree after the same root, as in a `Guess`.
        most: greatest number of draft tokens; later ones are left out.
    """
    tokens, parents, depths = list[int](), list[int](), [0]
    said, longest = [(1 << len(trees)) - 1], [0] * len(trees)
    known: dict[tuple[int, int], int] = {}  # node by (parent, token)
    for part, (guesses, above) in enumerate(trees):
        places = [0]  # node in the union for each node of this tree, -1 for none
        for token, parent in zip(guesses, above, strict=True):
            before = places[parent]
            node = known.get((before, token), -1)
            if node < 0 <= before and len(tokens) < most:
                tokens.append(token)
                parents.append(before)
                node = known[before, token] = len(tokens)
                depths.append(depths[before] + 1)
                said.append(0)
            places.append(node)
            if node > 0:
                said[node] |= 1 << part
                longest[part] = max(longest[part], depths[node])
    return Union(tokens, parents, said, longest)
