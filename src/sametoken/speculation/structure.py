"""Protocol of a grammar that constrains an output (structured output). Imports no grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sametoken.errors import RequestError
from sametoken.options.sampling import StructuredOutputs

__all__ = ["Grammar", "StructuredOutputs"]

if TYPE_CHECKING:
    from torch import Tensor


class Grammar(Protocol):
    """Grammar state of one sequence, after all tokens passed to `accept`."""

    @property
    def failure(self) -> RequestError | None:
        """Reason why the grammar could not be enforced to the end, or None."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by an emitted token; return True if no token may follow."""
        ...

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Mask of the tokens that may follow each node of a draft tree on the node's path; does not change the state.

        Args:
            tokens, parents: [N] nodes of the tree; node 0 was already passed to `accept`.

        Returns:
            [N, V] bool; undefined after a node that is itself not allowed. All False for a node whose mask took too
            long, and for node 0 once there is a `failure`.
        """
        ...

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that the grammar forces, split as the tokenizer would split them."""
        ...


def confine(scores: Tensor, tokens: Tensor, parents: Tensor, grammars: Sequence[Grammar | None]) -> None:
    """Ban in place each token that a row's grammar does not allow after a node.

    Args:
        scores: [B, N, V].
        tokens, parents: [B, N] the draft, copied to the host in one transfer each.
        grammars: one per row, None if the row has no grammar.
    """
    nodes, above = tokens.tolist(), parents.tolist()
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            allowed = grammar.allowed(nodes[row], above[row]).to(scores.device)
            scores[row].masked_fill_(~allowed, float("-inf"))
