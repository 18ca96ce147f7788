"""The protocol of a grammar that an output follows (structured output). No grammar library here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sametoken.errors import RequestError
from sametoken.options.sampling import StructuredOutputs

__all__ = ["Grammar", "StructuredOutputs"]

if TYPE_CHECKING:
    from torch import Tensor


class Grammar(Protocol):
    """What one sequence may still say; its state is that after all tokens told to `accept`."""

    @property
    def failure(self) -> RequestError | None:
        """Why it could not be kept to the end, or None."""
        ...

    def accept(self, token: int) -> bool:
        """Told of an emitted token; whether nothing may follow it."""
        ...

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Which tokens may follow each node of a draft tree, on the node's own path; the state stays.

        Args:
            tokens, parents: of N nodes; node 0 was told to `accept` already.

        Returns:
            [N, V] bool; what follows a node that is itself not allowed means nothing. Nothing may follow a node for
            whose mask there was no time; nothing may follow node 0 once there is a `failure`.
        """
        ...

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that the form leaves no choice about, as the tokenizer would spell them."""
        ...


def confine(scores: Tensor, tokens: Tensor, parents: Tensor, grammars: Sequence[Grammar | None]) -> None:
    """Bans in place what a row's grammar does not allow after each node.

    Args:
        scores: [B, N, V].
        tokens, parents: [B, N] the draft; one of them is read by the host per call.
        grammars: one per row, None where everything is allowed.
    """
    nodes, above = tokens.tolist(), parents.tolist()
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            allowed = grammar.allowed(nodes[row], above[row]).to(scores.device)
            scores[row].masked_fill_(~allowed, float("-inf"))
