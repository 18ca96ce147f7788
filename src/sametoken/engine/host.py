"""Step with a wait of the host: run the target, and append tokens to the request of each row.

Tokens are appended one by one, so that a stop inside an accepted path cuts ids, text, log-probabilities, counters and
`RowResult.committed` at one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.engine.meter import Meter
from sametoken.engine.plan import Decode, Plan, PromptPiece
from sametoken.engine.report import Done, Makers, Proposal, RowResult
from sametoken.engine.request import Emission, Request, TokenLogprob
from sametoken.engine.rows import Rows
from sametoken.engine.runner import Runner, Verified
from sametoken.engine.step_tree import StepTree
from sametoken.errors import RequestError, SametokenError, not_finite
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache
from sametoken.speculation.draft import PADDING
from sametoken.speculation.sampling import token_logprobs


class RowTree(NamedTuple):
    """Tree of one row, the root included; no tokens if the row is not decoding yet.

    Attributes:
        tokens: [nodes] token ids.
        parents: [nodes] index of the parent, -1 for the root.
        makers: drafters with a guess in the tree.
        said: [nodes] see `Union`; None if every maker made every guess.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    makers: Makers = ()
    said: Sequence[int] | None = None


class StepRunner(Protocol):
    """Interface of runners of steps, on the host or as graphs ahead of the host."""

    def run(self, plan: Plan, proposal: Proposal) -> Done:
        """Forward, verify and commit; return the result of this step, or of an older one if steps run ahead."""
        ...


class HostRunner(Runner):
    """Run a step and wait for it.

    Args:
        decoder: see `Runner`.
        cache: see `Runner`.
        taps: see `Runner`.
        rows: requests by row.
        meter: meter whose clock of the target runs during a step.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, taps: tuple[int, ...], rows: Rows, meter: Meter) -> None:
        super().__init__(decoder, cache, taps)
        self.rows, self.meter = rows, meter

    def run(self, plan: Plan, proposal: Proposal) -> Done:
        """Run a step; see `StepRunner`."""
        if not plan.decode and not plan.prefill:
            return Done(plan, proposal, [], [])
        decoding, reading = self.rows.of(plan.decode), self.rows.of(plan.prefill)
        sampled = decoding + self.rows.of(piece for piece in plan.prefill if piece.last)
        with self.meter.verifying:
            found = self.forward(
                plan, proposal.pending, proposal.guesses, lambda at: self.rows.sampling([sampled[i] for i in at])
            )
        self._score_prompts(plan.prefill, reading, found)
        results = []
        for place, item in enumerate(plan.decode):
            union, (tokens, parents) = proposal.unions.get(place), proposal.guesses[place]
            said, makers = None if union is None else union.said, proposal.makers[place]
            tree = RowTree([proposal.pending[place], *tokens], [-1, *parents], makers, said)
            results.append(self._decoded(decoding[place], item, found, place, tree))
        drawn = len(decoding)
        for place, (piece, request) in enumerate(zip(plan.prefill, reading, strict=True)):
            if not found.prompt_hidden[place].isfinite().all():  # these keys and values must not be shared
                request.fail(not_finite())
            features = None if found.features is None else found.features[len(decoding) + place]
            emission = Emission.end(request) if request.error is not None else None
            if piece.last:
                emission = self._emit(request, found, drawn, RowTree(), ())
                drawn += 1
            results.append(RowResult(request, piece.start, piece.tokens, features, 0, 0, emission, prompt=True))
        return Done(plan, proposal, results, decoding + reading, found.tokens)

    def _decoded(self, request: Request, item: Decode, found: Verified, place: int, tree: RowTree) -> RowResult:
        """Result of a decoding row."""
        tokens, depths = tree.tokens, _depths(tree.parents)
        emission = self._emit(request, found, place, tree, depths)
        # The cache has the root and the accepted nodes that the request took.
        taken = len(emission.token_ids)
        committed = [tokens[node] for node in found.paths[place][: taken + 1]] if taken else []
        features = None if found.features is None else found.features[place][: len(committed)]
        path = found.paths[place] if taken else [0]
        longest, accepted = (max(depths, default=0) if taken else 0), len(path) - 1
        return RowResult(request, item.start, committed, features, longest, accepted, emission, prompt=False, path=path)

    def _emit(self, request: Request, found: Verified, place: int, tree: RowTree, depths: Sequence[int]) -> Emission:
        """Append the accepted tokens and the target's draw to a request; fail the request if no token can be drawn."""
        path, bonus = found.paths[place], found.bonuses[place]
        if bonus == PADDING and request.error is None:
            request.fail(_undrawn(request, found, place))
        if request.error is not None:
            return Emission.end(request)
        emitted = [*(tree.tokens[node] for node in path[1:]), bonus]
        logprobs = []
        if request.params.logprobs is not None and found.logits is not None:
            logits = found.logits[[found.first[place] + node for node in path]]
            params = request.params
            logprobs = _token_logprobs(logits, emitted, params.logprobs or 0, params.logprob_token_ids)
        rejected, step = _children(path[-1], tree), None
        if request.reports_steps and found.logits is not None:
            step = StepTree.of(*tree, path, found.logits[found.first[place] :])
        return request.emit(emitted, len(path) - 1, depths, logprobs, rejected, step)

    def _score_prompts(self, pieces: Sequence[PromptPiece], reading: Sequence[Request], found: Verified) -> None:
        """Compute the log-probabilities of prompt tokens that requests need; the first token has none."""
        for piece, request, hidden in zip(pieces, reading, found.prompt_hidden, strict=True):
            if request.params.prompt_logprobs is None:
                continue
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)
            # A preempted request computes its tokens again.
            known = max(0, len(request.prompt_logprobs) - 1 - piece.start)
            end = piece.start + len(piece.tokens)
            follow = request.prompt_ids[piece.start + 1 + known : end + 1]
            if follow:
                logits = self.decoder.logits(hidden[known : known + len(follow)])
                request.prompt_logprobs += _token_logprobs(logits, follow, request.params.prompt_logprobs)


def _undrawn(request: Request, found: Verified, place: int) -> SametokenError:
    """Error of a request for which the target can draw no token after the root."""
    if found.logits is not None and not found.logits[found.first[place]].max().isfinite():
        return not_finite()
    return request.sampling.failure or RequestError(
        "the request's rules ban every token of the vocabulary at this place; expected at least one that is left"
    )


def _depths(parents: Sequence[int]) -> list[int]:
    """Depth of every draft token of one row's tree."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths[1:]


def _children(node: int, tree: RowTree) -> list[int]:
    """Tokens of the guesses after a node of one row's tree."""
    return [token for parent, token in zip(tree.parents, tree.tokens, strict=True) if parent == node]


def _token_logprobs(
    logits: Tensor, tokens: Sequence[int], top: int, listed: Sequence[int] | None = None
) -> list[TokenLogprob]:
    """One `TokenLogprob` per row of logits [R, V]; the arguments are those of `token_logprobs`.

    With `listed`, the row's own token is first unless it is listed too, as in vLLM.
    """
    own, others = (None if ids is None else torch.tensor(ids, device=logits.device) for ids in (tokens, listed))
    assert own is not None
    found = token_logprobs(logits, own, top, others)

    def before(token: int, logprob: float) -> list[tuple[int, float]]:
        return [] if listed is None or token in listed else [(token, logprob)]

    columns = (found.chosen.tolist(), found.rank.tolist(), found.top_tokens.tolist(), found.top_values.tolist())
    return [
        TokenLogprob(token, logprob, rank, (*before(token, logprob), *zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in zip(tokens, *columns, strict=True)
    ]
