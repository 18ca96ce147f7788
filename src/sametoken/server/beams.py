"""Beam search for the most probable outputs of a prompt, on the log-probabilities that the engine reports.

Every step is one engine request per live beam, for one token; the prefix cache has the keys and values of the beams.
Beams are ranked as in transformers: sum of log-probabilities / (number of tokens) ** length_penalty.
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
    """One candidate output.

    Attributes:
        tokens: token ids of the output.
        scores: log-probability of each token, with alternatives.
        total: sum of the log-probabilities of the tokens.
        end: token that ended the output; None for a live beam.
    """

    tokens: tuple[int, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    total: float = 0.0
    end: int | None = None

    def rank(self, penalty: float) -> float:
        """Score for the comparison of beams; the highest is the best."""
        return float(self.total / len(self.tokens) ** penalty)


def grow(
    live: Sequence[Beam], found: Sequence[TokenLogprob], end_ids: Collection[int], width: int
) -> tuple[list[Beam], list[Beam]]:
    """Extend beams by one token; return the live and the ended beams.

    Args:
        found: next token of each live beam, with at least 2 * `width` alternatives or the whole vocabulary. With one
            end token, at least `width` of so many candidates do not end their beam.
        end_ids: tokens that end a beam.
        width: largest number of live beams.
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
    """Best outputs of each prompt, the best first; an empty list if the client disconnects.

    Args:
        requests: one for each choice of each prompt, ordered by prompt; they are never run themselves.

    Raises:
        ApiError, SametokenError: a step was refused or failed.
    """
    done = list[Completion]()
    width = requests[0].params.n
    for first in requests[::width]:
        if not (found := await _search(worker, first, width, asked, receive)):
            return []
        done += found
    return done


async def _search(worker: Worker, first: Request, width: int, asked: BeamSearch, receive: Receive) -> list[Completion]:
    """Best outputs of one prompt, the best first; an empty list if the client disconnects."""
    params, begun, vocab = first.params, time.perf_counter(), worker.llm.config.vocab_size
    step = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=min(max(2 * width, params.logprobs or 0), vocab),
        cache_salt=params.cache_salt,
    )  # fmt: skip
    live, ended, one = [Beam()], list[Beam](), list[Completion]()
    for _ in range(min(params.max_tokens or first.room, first.room)):
        steps = worker.llm.requests([[*first.prompt_ids, *beam.tokens] for beam in live], step)
        found = await completions(worker.take(steps), receive)
        if len(found) < len(steps):
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
    """Completion of a beam; `step` is the completion of the prompt's first step, with the fields that beams share."""
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
