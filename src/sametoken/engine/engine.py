"""The engine's step: plan -> propose -> forward -> verify -> commit -> observe -> advance.

Holds the requests of one target and the drafters they use; tokens in, tokens out. Not thread-safe: one caller steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.control.cost import Costs
from sametoken.control.pace import Pace
from sametoken.drafters.base import Drafter
from sametoken.engine.blocks import BlockManager
from sametoken.engine.calibration import Calibration
from sametoken.engine.captured import CapturedSteps
from sametoken.engine.drafting import Drafting
from sametoken.engine.request import Request, TokenLogprob
from sametoken.engine.runner import Batch, Outcome, Prompt, Runner
from sametoken.engine.scheduler import Plan, Scheduler
from sametoken.errors import RequestError, SametokenError, not_finite
from sametoken.kernels.cpu.library import serial_torch
from sametoken.runtime.cache import PageTable
from sametoken.speculation.draft import PADDING, Draft
from sametoken.speculation.sampling import Sampling, token_logprobs

NO_DRAFT, AUTO = "none", "auto"  # methods that are no drafter: no one, and everyone


class EngineLoad(NamedTuple):
    """How busy an engine is, for whoever watches it.

    Attributes:
        running, waiting: requests with and without a row.
        pages_used, pages: of the cache's pool; pages kept for their prefix alone are not used.
        preemptions: requests that lost their row so far because pages ran out.
        draft_len: longest path that the last decoding step allowed a draft, 0 for none.
        paused: why hardly anything was drafted lately though it was allowed, "gain" or "slower"
            (see `Wish`); "" while drafts are made.
        draft_s, verify_s, other_s: seconds of all steps so far on drafts, on the target and on the rest.
    """

    running: int
    waiting: int
    pages_used: int
    pages: int
    preemptions: int
    draft_len: int
    paused: str
    draft_s: float
    verify_s: float
    other_s: float


class Engine:
    """Continuous batching of speculative decoding.

    Args:
        runner: the target over its cache.
        table: the page table that every cache of this engine shares.
        blocks: the pages of that table.
        drafting: the drafters by method name, and who uses them when.
        max_batch_size, max_num_tokens, pace: see `Scheduler`.
        captured: takes over steps that only decode, None for none.
    """

    def __init__(
        self,
        runner: Runner,
        table: PageTable,
        blocks: BlockManager,
        drafting: Drafting,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        pace: Pace,
        captured: CapturedSteps | None = None,
    ) -> None:
        self.captured, self.max_batch_size = captured, max_batch_size
        # Small tensors between calls of the compiled kernels are faster on one thread than beside the kernels' own.
        self._threads = nullcontext if runner.decoder.native is None else serial_torch
        self.runner, self.table, self.drafting, self._pace = runner, table, drafting, pace
        self.scheduler = Scheduler(
            blocks,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            pace=pace,
            drafts=drafting,
        )
        self._rows: dict[int, Request] = {}
        self._requests: dict[int, Request] = {}
        self._sampling: tuple[list[Request], Sampling] | None = None
        self._seconds = (0.0, 0.0, 0.0)  # draft, verify, other
        self._draft_len = self._preemptions = 0

    @property
    def drafters(self) -> dict[str, Drafter]:
        """By method name."""
        return self.drafting.drafters

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def load(self) -> EngineLoad:
        """May be asked by another thread than the one that steps."""
        scheduler = self.scheduler
        pages = scheduler.blocks.pages - 1  # without the sink
        used = pages - scheduler.blocks.available
        counts = (len(scheduler.running), len(scheduler.waiting), used, pages, self._preemptions)
        return EngineLoad(*counts, self._draft_len, self.drafting.pauses.reason, *self._seconds)

    def add(self, request: Request) -> None:
        """Takes a request; it runs when there is room."""
        self._requests[request.id] = request
        self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Ends a request now and frees its row and pages; an unknown or finished one is left alone."""
        request = self._requests.get(request_id)
        if request is not None:
            request.stop("abort", None)
            self._retire(request)

    def step(self) -> list[Request]:
        """One step over the batch; returns the requests that emitted tokens or ended."""
        with self._threads():
            changed = self.captured.step(self.scheduler) if self.captured is not None else None
            if changed is None:
                changed = self._step()
        for request in changed:
            if request.finish_reason is not None:
                self._retire(request)
        return changed

    def _step(self) -> list[Request]:
        """The step as the host sees it through."""
        self._calibrate()
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        self._apply(plan)
        if not plan.decode and not plan.prefill:
            return []
        decoding = [self._rows[item.row] for item in plan.decode]
        proposing = time.perf_counter()
        proposal = self.drafting.propose(plan.decode, decoding, self._sampling_of)
        drafted = time.perf_counter()
        batch = self._batch(plan, proposal.draft)
        sampled = decoding + [self._rows[chunk.row] for chunk in plan.prefill if chunk.last]
        outcome = self.runner.run(batch, self._sampling_of(sampled) if sampled else None)
        verified = time.perf_counter()
        self._score_prompts(batch, outcome)
        failed = self._check_prompts(batch, outcome)
        paths = self._advance(sampled, proposal.draft, outcome)
        self.drafting.learn(plan.decode, decoding, proposal, paths[: len(decoding)])
        observing = time.perf_counter()
        self._observe(batch, outcome, decoding)
        end = time.perf_counter()
        draft_s, verify_s = drafted - proposing + end - observing, verified - drafted
        other_s = end - begin - draft_s - verify_s
        for request in sampled + [self._rows[c.row] for c in plan.prefill if not c.last]:
            request.stats.draft_s += draft_s
            request.stats.verify_s += verify_s
            request.stats.other_s += other_s
        before = self._seconds
        self._seconds = (before[0] + draft_s, before[1] + verify_s, before[2] + other_s)
        self._draft_len = max((item.limit for item in plan.decode), default=self._draft_len)
        if decoding:
            progress = sum(accepted + 1 for _, accepted in paths[: len(decoding)]) / len(decoding)
            self._pace.saw(sum(len(prompt.tokens) for prompt in batch.prompts), end - begin, progress)
            if not batch.prompts:
                self._time(batch, any(proposal.drafters), progress, verify_s, other_s, end - begin)
        return sampled + [request for request in failed if request not in sampled]

    def _calibrate(self) -> None:
        """Measures what drafts cost before the first request that leaves its draft's length to the engine."""
        scheduler, policy = self.scheduler, self.drafting.policy
        if policy.costs is not None or not scheduler.free_rows:
            return
        if any(request.adaptive for request in scheduler.waiting):
            most = min(scheduler.max_num_tokens, self.table.table.shape[0] * (1 + policy.longest))
            context = self.table.table.shape[1] * self.table.page_size
            calibration = Calibration(self.runner, scheduler.free_rows, most, context)
            policy.costs = Costs(calibration.measure(self.drafters, policy.longest))

    def _time(
        self, batch: Batch, drafted: bool, progress: float, verify_s: float, other_s: float, seconds: float
    ) -> None:
        """Lets the policy know what a step that only decoded took by the wall, and how many tokens each row emitted."""
        policy, rows = self.drafting.policy, len(batch.rows)
        if policy.costs is not None:
            context = sum(batch.starts) / rows
            tokens = max(self.runner.decoder.least_rows, batch.draft.tokens.numel())
            policy.costs.saw_step(tokens, rows, context, verify_s, other_s)
            policy.saw_step(rows, context, progress, seconds, drafted)

    def _apply(self, plan: Plan) -> None:
        """Lets go of preempted rows, then seats the admitted and hands out pages."""
        self._preemptions += len(plan.preempted)
        for row in plan.preempted:
            self._leave(row)
        for row, request_id, cached, held in plan.admitted:
            request = self._rows[row] = self._requests[request_id]
            if not request.started:  # a preempted one finds its own pages, which nobody saved it
                request.cached_tokens, request.started, request.seated = cached, True, time.perf_counter()
            self.drafting.admit(row, request, cached, held)
        for row, pages in plan.pages:
            self.table.extend(row, pages)

    def _leave(self, row: int) -> None:
        request = self._rows.pop(row)
        self.table.clear(row)
        self.drafting.release(row, request)

    def _retire(self, request: Request) -> None:
        del self._requests[request.id]
        row = request.row
        self.scheduler.finish(request)
        if row is not None:
            self._leave(row)
        self.drafting.end(request)

    def _batch(self, plan: Plan, draft: Draft) -> Batch:
        rows = [item.row for item in plan.decode]
        prompts = [
            Prompt(row, start, self._rows[row].tokens[start : start + length], last)
            for row, start, length, last in plan.prefill
        ]
        return Batch(rows, [self._rows[row].committed for row in rows], draft, prompts)

    def _sampling_of(self, requests: list[Request]) -> Sampling:
        """The rows' sampling, kept while the batch stays the same and nothing in it depends on history."""
        kept = self._sampling
        if kept is not None and kept[1].reusable and kept[0] == requests:
            return kept[1]
        sampling = Sampling.of([request.sampling for request in requests])
        self._sampling = (list(requests), sampling)
        return sampling

    def _advance(self, sampled: Sequence[Request], draft: Draft, outcome: Outcome) -> list[tuple[int, int]]:
        """Hands every sampled row its accepted tokens and the target's own; they stop where they must.

        Returns:
            Per row the longest path of its draft and how many of its tokens were accepted.
        """
        if outcome.verdict is None:
            return []
        seen = []
        paths, lengths = outcome.verdict.path.tolist(), outcome.verdict.length.tolist()
        tokens, bonuses = draft.tokens.tolist(), outcome.verdict.bonus.tolist()
        parents = draft.parents.tolist()
        for i, request in enumerate(sampled):
            accepted = lengths[i]
            guesses = tokens[i] if i < len(tokens) else []
            if bonuses[i] == PADDING and request.error is None:
                request.fail(_undrawn(request, outcome, i))
            if request.error is not None:
                seen.append((0, 0))
                continue
            emitted = [guesses[node] for node in paths[i][1 : accepted + 1]] + [bonuses[i]]
            drafted = _guess_depths(guesses, parents[i]) if guesses else []
            logprobs = self._logprobs(request, outcome, i, paths[i][: accepted + 1], emitted)
            # Root and accepted nodes are in the cache now; a prompt piece is counted by `_observe`.
            if i < len(tokens):
                request.committed += accepted + 1
            rejected = _children(paths[i][accepted], guesses, parents[i]) if guesses else []
            request.emit(emitted, accepted, drafted, logprobs, rejected)
            request.committed = min(request.committed, len(request.tokens))
            seen.append((max(drafted, default=0), accepted))
        return seen

    def _logprobs(
        self, request: Request, outcome: Outcome, place: int, path: Sequence[int], emitted: Sequence[int]
    ) -> list[TokenLogprob]:
        if request.params.logprobs is None or outcome.logits is None:
            return []
        return _token_logprobs(outcome.logits[place, path], emitted, request.params.logprobs)

    def _score_prompts(self, batch: Batch, outcome: Outcome) -> None:
        """Log-probabilities of prompt tokens, for the requests that want them; the first token has none."""
        for prompt, hidden in zip(batch.prompts, outcome.prompt_hidden, strict=True):
            request = self._rows[prompt.row]
            if request.params.prompt_logprobs is None:
                continue
            known = len(request.prompt_logprobs)
            if known == 0:
                request.prompt_logprobs.append(None)
            follow = request.prompt_ids[prompt.start + 1 : prompt.start + 1 + len(prompt.tokens)]
            follow = follow[max(0, known - 1 - prompt.start) :]  # a preempted request recomputes what it has
            if follow:
                first = len(request.prompt_logprobs) - 1 - prompt.start
                rows = hidden[first : first + len(follow)]
                logits = self.runner.decoder.logits(rows)
                request.prompt_logprobs += _token_logprobs(logits, follow, request.params.prompt_logprobs)

    def _check_prompts(self, batch: Batch, outcome: Outcome) -> list[Request]:
        """Ends and returns the requests with a prompt token whose hidden state is not finite: others may not see it."""
        failed = []
        for prompt, hidden in zip(batch.prompts, outcome.prompt_hidden, strict=True):
            if not hidden.isfinite().all():
                failed.append(self._rows[prompt.row])
                failed[-1].fail(not_finite())
        return failed

    def _observe(self, batch: Batch, outcome: Outcome, decoding: Sequence[Request]) -> None:
        """Tells drafters what became certain: accepted paths, then prompt pieces."""
        nodes = 0 if outcome.verdict is None else outcome.verdict.path.shape[1]
        for method in self.drafters:
            # Finished requests too: what their pages offer to others may be there in the drafter's half as well.
            places = [i for i, request in enumerate(decoding) if method in request.methods]
            if places:
                certain = [decoding[i].tokens[batch.starts[i] : decoding[i].committed] for i in places]
                features = self._path_features(outcome, places, [len(tokens) for tokens in certain], nodes)
                self.drafting.observe(method, [batch.rows[i] for i in places], certain, features, prompt=False)
        begin = len(decoding) * nodes
        for prompt in batch.prompts:
            request, count = self._rows[prompt.row], len(prompt.tokens)
            request.committed += count
            features = None if outcome.features is None else outcome.features[begin : begin + count]
            for method in request.methods:
                self.drafting.observe(method, [prompt.row], [prompt.tokens], features, prompt=True)
            begin += max(self.runner.decoder.least_rows, count)

    def _path_features(
        self, outcome: Outcome, places: Sequence[int], lengths: Sequence[int], nodes: int
    ) -> Tensor | None:
        """Hidden states of the first `lengths` tokens on the accepted paths of some decoding rows, concatenated."""
        if outcome.features is None or outcome.verdict is None:
            return None
        paths = outcome.verdict.path.tolist()
        at = [i * nodes + node for i, length in zip(places, lengths, strict=True) for node in paths[i][:length]]
        return outcome.features[at]


def _undrawn(request: Request, outcome: Outcome, place: int) -> SametokenError:
    """Why the target can draw no token after a sampled row's root."""
    if outcome.logits is not None and not outcome.logits[place, 0].max().isfinite():
        return not_finite()
    return request.sampling.failure or RequestError(
        "the request's rules ban every token of the vocabulary at this place; expected at least one that is left"
    )


def _guess_depths(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Depth of every draft token of one row's tree, padding left out."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return [depth for depth, token in zip(depths[1:], tokens[1:], strict=True) if token != PADDING]


def _children(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Tokens of the guesses that follow a node of one row's tree."""
    guesses = zip(parents[1:], tokens[1:], strict=True)
    return [token for parent, token in guesses if parent == node and token != PADDING]


def _token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """One `TokenLogprob` per row of logits [R, V]."""
    found = token_logprobs(logits, torch.tensor(tokens, device=logits.device), top)
    columns = (found.chosen.tolist(), found.rank.tolist(), found.top_tokens.tolist(), found.top_values.tolist())
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in zip(tokens, *columns, strict=True)
    ]
