"""Protocol of drafting inside a captured step: tensors of fixed shape, and no value that the host reads.

Legend: B graph slots, K tokens of the longest path, N nodes of a draft, W width of the taps together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sametoken.runtime.graph_slots import GraphSlots
from sametoken.speculation.draft import Draft, chain_parents
from sametoken.speculation.sampling import Sampling


class Proposer(Protocol):
    """Part of a drafter that a captured step contains.

    Attributes:
        depth: K, tokens of the longest path.
        nodes: N, nodes of every draft, the pending token included.
        slots: most cache slots, from the pending token on, that drafting or verification takes.
        chain: true if every draft is a chain, whose accepted path need not be moved in the cache.
        taps: target layers whose hidden states are read, see `Drafter`.
    """

    depth: int
    nodes: int
    slots: int
    chain: bool = True
    taps: tuple[int, ...] = ()

    def enter(self, row: int) -> Tensor | None:
        """Start drafting for the row on the device, until `leave`.

        Returns:
            [1, W] features of the row's last committed token; None without taps.
        """
        return None

    def guess(self, graph_slots: GraphSlots, sampling: Sampling, keys: int) -> Draft:
        """Draft [B, N] after the pending tokens, padded past `graph_slots.longest`; the same kernels at every call.

        Args:
            keys: upper bound of the keys of any row, this step's `slots` included.
        """
        ...

    def committed(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Record the tokens that a step committed at positions from `start` on; called when the host has read them."""
        return

    def outgrown(self, row: int) -> bool:
        """True if the host has to change the row's place in the cache; the row enters again after that."""
        return False

    def leave(self, row: int, features: Tensor) -> None:
        """Return the row to the host.

        Args:
            features: [count, W] features of the last committed tokens.
        """
        return


class Plain(Proposer):
    """Proposer of empty drafts: plain decoding."""

    depth, nodes, slots = 0, 1, 1

    def guess(self, graph_slots: GraphSlots, sampling: Sampling, keys: int) -> Draft:
        return Draft(graph_slots.pending.unsqueeze(1), chain_parents(graph_slots.batch, 1, graph_slots.pending.device))


class Capturable(Protocol):
    """Interface of drafters that may have a proposer for captured steps."""

    def captured(self) -> Proposer | None:
        """Proposer for captured steps, None if the drafter works on the host only."""
        ...


def proposers(drafters: Mapping[str, Capturable], plain: str) -> dict[str, Proposer]:
    """Proposers for captured steps by method: plain decoding under the name `plain`, and those of the drafters."""
    found = {method: drafter.captured() for method, drafter in drafters.items()}
    return {plain: Plain(), **{method: each for method, each in found.items() if each is not None}}
