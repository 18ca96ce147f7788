"""One sequence from prompt to completion: its tokens, how many are computed, when it stops, its statistics.

A request refers to no tensors of the model and no row but its own. Ids, text, log-probabilities and counters are
trimmed together, at the token where the request stops, even in the middle of an accepted draft.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sametoken.drafters.automaton import SuffixAutomaton
from sametoken.engine.detokenize import Detokenizer
from sametoken.engine.stats import SpeculationStats
from sametoken.engine.step_tree import StepTree
from sametoken.errors import SametokenError
from sametoken.options.sampling import SamplingParams
from sametoken.speculation.sampling import RowSampling

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(NamedTuple):
    """Log-probability of one token under the model's raw distribution, its rank from 1, and the best alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Emission(NamedTuple):
    """Output of a request in one step, or in several joined steps.

    Attributes:
        token_ids: in order; empty where the request ended without a token.
        origins, rejected, logprobs: of these tokens, see `Request`; `logprobs` is empty unless requested.
        steps: the trees of guesses of the forwards, empty unless requested.
        drafted, accepted: draft tokens that were verified, and those of them among `token_ids`.
        finished: true if the request ended with this emission.
    """

    request: Request
    token_ids: list[int]
    origins: list[bool]
    rejected: list[tuple[int, ...]]
    logprobs: list[TokenLogprob]
    drafted: int
    accepted: int
    finished: bool
    steps: Sequence[StepTree] = ()

    @classmethod
    def end(cls, request: Request) -> Emission:
        """Emission of a request that ended without a token."""
        return cls(request, [], [], [], [], 0, 0, finished=True)

    def then(self, later: Emission) -> Emission:
        """This emission joined with the next one of the same request."""
        return Emission(
            self.request,
            self.token_ids + later.token_ids,
            self.origins + later.origins,
            self.rejected + later.rejected,
            self.logprobs + later.logprobs,
            self.drafted + later.drafted,
            self.accepted + later.accepted,
            later.finished,
            [*self.steps, *later.steps],
        )


def salt_of(*parts: str) -> bytes:
    """Cache salt of an owner and a caller's salt, which keeps their texts apart from others; b"" if neither is
    given.
    """
    return "\0".join(parts).encode(errors="replace") if any(parts) else b""


@dataclass(slots=True, eq=False)
class Request:
    """A sequence in the engine.

    Attributes:
        id: unique number. `index` and `choice`: number of the prompt in its call, and of the choice among its n.
        arrived, seated, first_token, finished: times when it was made, first had a row, first emitted, and ended, in
            seconds of `time.perf_counter`; None until then.
        tokens: prompt and output; the last one is pending (not in the cache) while the request decodes.
        committed: leading tokens whose keys and values are in the target's cache; the scheduler alone sets it.
        row: place in the batch, None while waiting; `last_row`: the one that it has or had; `started` once it had one.
        stop_ids: tokens that end the request; `eos_ids` among them end it without a stop reason.
        error: the error that ended it if `finish_reason` is "error": a `RequestError` where the request is at fault.
        method: name of the drafting method; `methods` are its drafters, in order of preference.
        most_tokens: of prompt and output together.
        max_draft_len: longest path of a draft; `adaptive` if the engine chooses up to that length.
        prediction: the output that the caller predicted, None if it did not.
        owner: name of its owner; requests of different owners share neither cached prompts nor texts to draft from.
        origins: for every output token, True if it was drafted; `rejected`: guesses at its position that the target did
            not draw, empty for a drafted token or without guesses.
        steps: the tree of guesses of every forward, if requested.
        page_size: tokens of a page of the cache that later requests may share, 0 if pages are not shared.
        preemptions: times that it lost its row because pages ran out.
        draft_kv: the drafter whose keys and values the cache pages hold too, "" for none; `complete` if only such pages
            are reused.
    """

    id: int
    index: int
    choice: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    sampling: RowSampling
    detokenizer: Detokenizer
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    method: str
    methods: tuple[str, ...]
    adaptive: bool
    draft_kv: str
    complete: bool
    max_draft_len: int
    max_seq_len: int
    page_size: int = 0
    preemptions: int = 0
    prediction: SuffixAutomaton | None = None
    owner: str = ""
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    cached_tokens: int = 0
    row: int | None = None
    last_row: int | None = None
    started: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: SametokenError | None = None
    origins: list[bool] = field(default_factory=list)
    rejected: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    steps: list[StepTree] = field(default_factory=list)
    stats: SpeculationStats = field(init=False)
    most_tokens: int = field(init=False)
    arrived: float = field(default_factory=time.perf_counter)
    seated: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.stats = SpeculationStats(self.method)
        most = self.params.max_tokens
        self.most_tokens = min(self.max_seq_len, self.max_seq_len if most is None else len(self.prompt_ids) + most)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def remaining(self) -> int:
        """Number of tokens still to be computed."""
        return len(self.tokens) - self.committed

    @property
    def room(self) -> int:
        """Number of tokens that may still be emitted."""
        return self.most_tokens - len(self.tokens)

    @property
    def draft_limit(self) -> int:
        """Longest useful draft: with the bonus token it fills the room that is left."""
        return max(0, min(self.max_draft_len, self.room - 1))

    @property
    def reports_steps(self) -> bool:
        """True if the caller requested the tree of guesses of every forward."""
        return self.params.speculative is not None and self.params.speculative.steps

    @property
    def shares_prefix(self) -> bool:
        """True if shared pages may be reused: prompt log-probabilities need every prompt token computed."""
        return self.params.prompt_logprobs is None

    @property
    def salt(self) -> bytes:
        """Cache salt from its owner and its own salt: requests with different salts share no texts."""
        return salt_of(self.owner, self.params.cache_salt or "")

    @property
    def kept_tokens(self) -> int:
        """Prompt tokens that were computed and are kept for later requests: those of full pages."""
        if not self.page_size or not self.shares_prefix:
            return 0
        return max(0, len(self.prompt_ids) // self.page_size * self.page_size - self.cached_tokens)

    def emit(
        self,
        tokens: Sequence[int],
        accepted: int,
        drafted: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        rejected: Sequence[int] = (),
        step: StepTree | None = None,
    ) -> Emission:
        """Append the tokens of one forward, up to the token where the request stops, and return those that were kept.

        Args:
            tokens: accepted draft tokens and the target's own token after them.
            accepted: number of `tokens` from the draft.
            drafted: depth in the tree of each draft token that was verified; 1 follows the pending token.
            logprobs: one per token, or empty.
            rejected: guesses at the position of the target's own token; empty for a captured step.
            step: the tree of guesses, for a request that reports it.
        """
        kept = 0
        for token in tokens:
            self.tokens.append(token)
            kept += 1
            if self._stops_at(token):
                break
        origins = [i < accepted for i in range(kept)]
        spurned = [tuple(rejected) if i == accepted else () for i in range(kept)]
        said = list(logprobs[:kept])
        self.origins += origins
        self.rejected += spurned
        self.logprobs += said
        steps = [] if step is None else [step.cut(kept)]
        self.steps += steps
        taken = min(accepted, kept)
        self.stats.count(kept, len(drafted), taken, max(drafted, default=0))
        if self.first_token is None:
            self.first_token = time.perf_counter()
        if self.finish_reason is None:
            self.sampling.extend(tokens[:kept])
        ended = self.finish_reason is not None
        return Emission(self, list(tokens[:kept]), origins, spurned, said, len(drafted), taken, ended, steps)

    def _stops_at(self, token: int) -> bool:
        """Add the token to the text and return True if the request ends here."""
        is_end = token in self.stop_ids
        complete = self.sampling.accept(token)
        full = self.room <= 0
        self.detokenizer.push(token)
        if is_end or full or complete:
            self.detokenizer.finish()  # text that was not sent yet may complete a stop string
        found = None
        if len(self.tokens) - len(self.prompt_ids) >= self.params.min_tokens:
            found = self.detokenizer.find_stop()
        else:
            self.detokenizer.pass_stop()
        if found is not None:
            self.stop("stop", found)
        elif is_end:
            self.stop("stop", None if token in self.eos_ids else token)
        elif complete and self.sampling.failure is not None:
            self.fail(self.sampling.failure)
        elif complete:
            self.stop("stop", None)
        elif full:
            self.stop("length", None)
        return self.finish_reason is not None

    def stop(self, reason: FinishReason, detail: int | str | None) -> None:
        """End the request; its text is complete from here on."""
        self.finish_reason, self.stop_reason = reason, detail
        self.finished = time.perf_counter()
        self.detokenizer.finish()

    def fail(self, error: SametokenError) -> None:
        """End the request with an error; other requests continue."""
        self.error = error
        self.stop("error", str(error))
