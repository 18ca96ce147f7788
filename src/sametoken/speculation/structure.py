"""Protocol of a grammar that an output follows (structured output). No grammar library here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sametoken.errors import RequestError
from sametoken.options.sampling import StructuredOutputs

__all__ = ["Grammar", "StructuredOutputs"]

if TYPE_CHECKING:
    from torch import Tensor


class Grammar(Protocol):
    """Grammar of one sequence, in its state after all tokens passed to `accept`."""

    @property
    def failure(self) -> RequestError | None:
        """Reason why it could not be enforced to the end, or None."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by an emitted token; return True if no token may follow it."""
        ...

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Mask of the tokens that may follow each node of a draft tree, on the node's own path; the state is unchanged.

        Args:
            tokens, parents: of N nodes; node 0 was already passed to `accept`.

        Returns:
            [N, V] bool; the mask after a node that is itself not allowed is meaningless. All False for a node whose
            mask took too long, and for node 0 once there is a `failure`.
        """
        ...

    def forced(self, limit: int) -> list[int]:
        """At most `limit` forced tokens, in the tokenizer's spelling."""
        ...


def confine(scores: Tensor, tokens: Tensor, parents: Tensor, grammars: Sequence[Grammar | None]) -> None:
    """Ban in place the tokens that a row's grammar does not allow after each node.

    Args:
        scores: [B, N, V].
        tokens, parents: [B, N] the draft; one of them is read by the host per call.
        grammars: one per row, None if all tokens are allowed.
    """
    nodes, above = tokens.tolist(), parents.tolist()
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            allowed = grammar.allowed(nodes[row], above[row]).to(scores.device)
            scores[row].masked_fill_(~allowed, float("-inf"))
