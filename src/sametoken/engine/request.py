"""Sequence from prompt to completion: tokens, computed length, end and statistics.

A request refers to no tensors of the model. Ids, text, log-probabilities and counters are cut together, at the token
where the request stops, even in the middle of an accepted draft.
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
    """Log-probability of one token under the raw distribution of the model.

    Attributes:
        token_id: token.
        logprob: natural logarithm of the probability.
        rank: rank of the token, from 1.
        top: best alternatives, each with its log-probability.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Emission(NamedTuple):
    """Output of a request in one step, or in several joined steps.

    Attributes:
        request: request of the output.
        token_ids: tokens in order; empty if the request ended without a token.
        origins: for every token, see `Request`.
        rejected: for every token, see `Request`.
        logprobs: log-probabilities of the tokens; empty unless requested.
        drafted: number of verified draft tokens.
        accepted: number of draft tokens among `token_ids`.
        finished: true if the request ended with this emission.
        steps: trees of guesses of the forwards; empty unless requested.
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
        """Join this emission with the next one of the request."""
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
    """Cache salt of an owner and of a caller's salt, which separates their texts from others; b"" without both."""
    return "\0".join(parts).encode(errors="replace") if any(parts) else b""


@dataclass(slots=True, eq=False)
class Request:
    """A sequence in the engine.

    Attributes:
        id: unique number.
        index: number of the prompt in its call.
        choice: number of the choice among the n of its prompt.
        method: name of the drafting method.
        methods: drafters of the method, in order of preference.
        adaptive: true if the engine chooses draft lengths up to `max_draft_len`.
        draft_kv: drafter whose keys and values the cache pages also hold; "" for none.
        complete: true if only pages with these keys and values are reused.
        max_draft_len: longest path of a draft in tokens.
        max_seq_len: longest sequence of the engine in tokens.
        page_size: tokens of a page of the cache that later requests may share; 0 if pages are not shared.
        preemptions: number of times that the request lost its row because pages ran out.
        prediction: output that the caller predicted; None for none.
        owner: name of the owner; requests of different owners share neither cached prompts nor texts to draft from.
        stop_ids: tokens that end the request.
        eos_ids: tokens of `stop_ids` that end the request without a stop reason.
        tokens: prompt and output; the last token is pending (not in the cache) while the request decodes.
        committed: number of leading tokens whose keys and values are in the target's cache; set by the scheduler.
        cached_tokens: number of prompt tokens whose keys and values were reused.
        row: row of the page table; None while waiting.
        last_row: current or last row.
        started: true once the request has had a row.
        error: error that ended the request, a `RequestError` for an error of the request; None without one.
        origins: for every output token, True if it was drafted.
        rejected: for every output token, guesses at its position that the target did not draw; empty for a drafted
            token.
        steps: tree of guesses of every forward, if requested.
        most_tokens: greatest number of tokens of prompt and output together.
        arrived: time of creation, in seconds of `time.perf_counter`.
        seated: time of the first row; None before.
        first_token: time of the first output token; None before.
        finished: time of the end; None before.
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
        """Longest useful draft, which fills the remaining room together with the bonus token."""
        return max(0, min(self.max_draft_len, self.room - 1))

    @property
    def reports_steps(self) -> bool:
        """True if the caller requested the tree of guesses of every forward."""
        return self.params.speculative is not None and self.params.speculative.steps

    @property
    def shares_prefix(self) -> bool:
        """True if shared pages may be reused; prompt log-probabilities need every prompt token computed."""
        return self.params.prompt_logprobs is None

    @property
    def salt(self) -> bytes:
        """Cache salt from owner and requested salt; requests with different salts share no texts."""
        return salt_of(self.owner, self.params.cache_salt or "")

    @property
    def kept_tokens(self) -> int:
        """Number of computed prompt tokens that are kept for later requests: those of full pages."""
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
        """Append the tokens of one forward, up to the token where the request stops, and return them.

        Args:
            tokens: accepted draft tokens, and the target's own token after them.
            accepted: number of `tokens` from the draft.
            drafted: depth in the tree of each verified draft token; 1 is next to the pending token.
            logprobs: log-probability of each token, or empty.
            rejected: guesses at the position of the target's own token; empty for a captured step.
            step: tree of guesses, for a request that reports trees.
        """
        kept = 0
        for token in tokens:
            self.tokens.append(token)
            kept += 1
            if self._stops_at(token):
                break
        origins = [i < accepted for i in range(kept)]
        rejections = [tuple(rejected) if i == accepted else () for i in range(kept)]
        own_logprobs = list(logprobs[:kept])
        self.origins += origins
        self.rejected += rejections
        self.logprobs += own_logprobs
        steps = [] if step is None else [step.cut(kept)]
        self.steps += steps
        taken = min(accepted, kept)
        self.stats.count(kept, len(drafted), taken, max(drafted, default=0))
        if self.first_token is None:
            self.first_token = time.perf_counter()
        if self.finish_reason is None:
            self.sampling.extend(tokens[:kept])
        ended = self.finish_reason is not None
        return Emission(self, list(tokens[:kept]), origins, rejections, own_logprobs, len(drafted), taken, ended, steps)

    def _stops_at(self, token: int) -> bool:
        """Add the token to the text and return True if the request ends here."""
        is_end = token in self.stop_ids
        complete = self.sampling.accept(token)
        full = self.room <= 0
        self.detokenizer.push(token)
        if is_end or full or complete:
            self.detokenizer.finish()  # held-back text may complete a stop string
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
        """End the request, and its text."""
        self.finish_reason, self.stop_reason = reason, detail
        self.finished = time.perf_counter()
        self.detokenizer.finish()

    def fail(self, error: SametokenError) -> None:
        """End the request with an error; other requests continue."""
        self.error = error
        self.stop("error", str(error))
