"""Beam search: the likeliest outputs of a prompt, found token by token with the scores that the engine reports.

Every step asks the engine for one token of each live beam; the prefix cache holds what the beams have read. Beams are
ranked as in transformers: sum of log-probabilities over (number of tokens) ** length_penalty.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from starlette.types import Receive

from sametoken.engine.completion import Completion
from sametoken.engine.detokenize import Detokenizer
from sametoken.engine.request import Request, TokenLogprob
from sametoken.options.sampling import SamplingParams
from sametoken.server.reply import completions
from sametoken.server.text_request import BeamSearch
from sametoken.server.worker import Worker


class Beam(NamedTuple):
    """An output that may go on.

    Attributes:
        tokens: of the output. `scores`: one for each token.
        total: sum of their log-probabilities.
        end: the token that ended it, None while it may go on.
    """

    tokens: tuple[int, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    total: float = 0.0
    end: int | None = None

    def rank(self, penalty: float) -> float:
        """Score by which beams are compared: higher is better."""
        return float(self.total / len(self.tokens) ** penalty)


def grow(
    live: Sequence[Beam], found: Sequence[TokenLogprob], end_ids: Collection[int], width: int
) -> tuple[list[Beam], list[Beam]]:
    """Live and ended beams after one more token.

    Args:
        found: for each live beam its next token, with at least 2 * `width` alternatives or the whole vocabulary: of so
            many candidates at least `width` do not end a beam that has one end token.
        end_ids: tokens that end a beam.
    """
    grown = list[Beam]()
    for beam, item in zip(live, found, strict=True):
        for rank, (token, logprob) in enumerate(item.top[: 2 * width], start=1):
            score = TokenLogprob(token, logprob, rank, item.top)
            end = token if token in end_ids else None
            grown.append(Beam((*beam.tokens, token), (*beam.scores, score), beam.total + logprob, end))
    goes_on = [beam for beam in grown if beam.end is None]
    return (
        heapq.nlargest(width, goes_on, key=lambda beam: beam.total),
        [beam for beam in grown if beam.end is not None],
    )


async def search(worker: Worker, requests: Sequence[Request], asked: BeamSearch, receive: Receive) -> list[Completion]:
    """The best outputs of each prompt, best first; none if the client disconnects.

    Args:
        requests: by prompt, then by choice; they themselves never run.

    Raises:
        ApiError, SametokenError: as for other requests, at any step.
    """
    done = list[Completion]()
    width = requests[0].params.n
    for first in requests[::width]:
        if not (found := await _search(worker, first, width, asked, receive)):
            return []
        done += found
    return done


async def _search(worker: Worker, first: Request, width: int, asked: BeamSearch, receive: Receive) -> list[Completion]:
    """The best outputs of one prompt."""
    params, begun, vocab = first.params, time.perf_counter(), worker.llm.config.vocab_size
    step = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=min(max(2 * width, params.logprobs or 0), vocab),
        cache_salt=params.cache_salt,
    )  # fmt: skip
    live, ended, one = [Beam()], list[Beam](), list[Completion]()
    for _ in range(min(params.max_tokens or first.room, first.room)):
        asks = worker.llm.requests([[*first.prompt_ids, *beam.tokens] for beam in live], step)
        found = await completions(worker.take(asks), receive)
        if len(found) < len(asks):
            return []
        one = one or found
        items = [item for completion in found for item in completion.logprobs or ()]
        live, more = grow(live, items, first.stop_ids, width)
        ended = heapq.nlargest(width, [*ended, *more], key=lambda beam: beam.rank(asked.length_penalty))
        if not live:
            break
    best = heapq.nlargest(width, [*ended, *live], key=lambda beam: beam.rank(asked.length_penalty))
    return [_completion(worker, first, choice, beam, one[0], begun) for choice, beam in enumerate(best)]


def _completion(worker: Worker, first: Request, choice: int, beam: Beam, step: Completion, begun: float) -> Completion:
    """The completion of a beam; `step` is that of the first token of its prompt."""
    kept = beam.tokens[:-1] if beam.end is not None and not first.params.include_stop_str_in_output else beam.tokens
    spoken = Detokenizer(worker.llm.tokenizer, first.prompt_ids, replace(first.params, stop=()))
    for token in kept:
        spoken.push(token)
    spoken.finish()
    return replace(
        step,
        index=first.index,
        choice=choice,
        prompt=first.prompt,
        text=spoken.text,
        token_ids=list(beam.tokens),
        finish_reason="length" if beam.end is None else "stop",
        stop_reason=None if beam.end is None or beam.end in first.eos_ids else beam.end,
        origins=[False] * len(beam.tokens),
        rejected=[()] * len(beam.tokens),
        logprobs=None if first.params.logprobs is None else list(beam.scores),
        seconds=time.perf_counter() - begun,
        steps=None,
    )
