"""Tree of guesses of one forward, for callers that request it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.speculation.sampling import token_logprobs


class StepTree(NamedTuple):
    """Guesses of one forward; a forward without guesses has empty lists. Legend: G guesses.

    Attributes:
        drafter: name of the drafter, of several one that guessed the accepted path; None for none.
        token_ids: [G] guesses.
        parents: [G] index of the guess before each one, -1 for the last token before the forward.
        probabilities: [G] target's probability of each guess after its parent, before temperature and penalties.
        accepted: [G] True if the guess became output.
        drafters: [G] names of the drafters that made each guess.
    """

    drafter: str | None = None
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    accepted: tuple[bool, ...] = ()
    drafters: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        makers: Sequence[str],
        said: Sequence[int] | None,
        path: Sequence[int],
        logits: Tensor,
    ) -> StepTree:
        """Build the tree from one row of a draft.

        Args:
            tokens: [N] tokens of the nodes, the root first.
            parents: [N] indices of their parents.
            makers: drafters of the guesses.
            said: [N] see `Union`; None if every maker made every guess.
            path: accepted nodes, the root first.
            logits: [>= N, V] logits of the target after each node.
        """
        guesses, before, nodes = tokens[1:], parents[1:], range(1, len(tokens))
        if not guesses:
            return cls()

        def makers_of(node: int) -> tuple[str, ...]:
            return tuple(maker for bit, maker in enumerate(makers) if said is None or said[node] >> bit & 1)

        found = token_logprobs(logits[list(before)], torch.tensor(guesses, device=logits.device), 0)
        accepted = set(path)
        return cls(
            makers_of(path[-1])[0],
            tuple(guesses),
            tuple(parent - 1 for parent in before),
            tuple(found.chosen.exp().tolist()),
            tuple(node in accepted for node in nodes),
            tuple(map(makers_of, nodes)),
        )

    def cut(self, kept: int) -> StepTree:
        """Copy for a request that ended after `kept` tokens; guesses after the end are not accepted."""
        counted = zip(self.accepted, accumulate(self.accepted), strict=True)
        return self._replace(accepted=tuple(accepted and count <= kept for accepted, count in counted))

    def to_json(self) -> dict[str, Any]:
        """JSON object of `sametoken generate --json`."""
        parts = {name: list(value) for name, value in self._asdict().items() if name != "drafter"}
        return {"drafter": self.drafter, **parts, "drafters": list(map(list, self.drafters))}
