"""Plain and speculative decoding of equal requests on one engine, in interleaved rounds, compared token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean
from typing import NamedTuple

from sametoken.bench.drive import Pass, TimedRequest, branch, drive
from sametoken.bench.measure import acceptance, choices, context_costs, per_token, ratio_interval, spread, step_costs
from sametoken.bench.record import Cell, Mismatch
from sametoken.bench.variant import Category, TimeShares, Variant
from sametoken.bench.workloads import Workload, fit, spell_turn
from sametoken.engine.llm import LLM
from sametoken.errors import PromptTooLongError
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.prompts.files import PromptItem
from sametoken.prompts.sources import Conversation

WARM_UP_TOKENS = 8


class DraftShape(NamedTuple):
    """Shape of the drafts of one variant.

    Attributes:
        max_draft_len: draft length in tokens, or the longest one if `chosen`; 0 for plain decoding.
        chosen: true if the controller chooses the length of every step.
        tree_top_k: branches of each level; 1 for a chain.
    """

    max_draft_len: int
    chosen: bool = False
    tree_top_k: int = 1

    def __str__(self) -> str:
        branches = f", {self.tree_top_k} branches" if self.tree_top_k > 1 else ""
        return f"draft length {'chosen' if self.chosen else self.max_draft_len}{branches}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Varied settings, and settings common to all cells.

    Attributes:
        draft_lens: draft lengths that are compared with plain decoding.
        tree_top_ks: branches of each level, combined with every length; 1 for a chain.
        chosen: measure the controller too, with the greatest length and the fewest branches.
        batches: batch sizes.
        prompt_lens: tokens that prompts are fitted to; None for prompts as they are.
        temperatures: temperatures of sampling.
        output_len: greatest number of output tokens.
        repeat: number of rounds.
        seed: seed of the first request; each further request has the next one.
        ignore_eos: generate `output_len` tokens even after an end token.
    """

    draft_lens: Sequence[int]
    tree_top_ks: Sequence[int]
    chosen: bool
    batches: Sequence[int]
    prompt_lens: Sequence[int | None]
    temperatures: Sequence[float]
    output_len: int
    repeat: int
    seed: int
    ignore_eos: bool

    @property
    def drafts(self) -> list[DraftShape]:
        """Variants of every cell, plain decoding first."""
        fewest = min(self.tree_top_ks)
        fixed = [DraftShape(length, False, branches) for branches in self.tree_top_ks for length in self.draft_lens]
        controller = [DraftShape(max(self.draft_lens), True, fewest)] if self.chosen else []
        return [DraftShape(0, False, fewest), *fixed, *controller]  # the baseline is first

    def takes(self, workloads: int) -> int:
        """Total number of passes over the requests of a cell, the unit of progress."""
        cells = workloads * len(self.batches) * len(self.prompt_lens) * len(self.temperatures)
        return cells * self.repeat * len(self.drafts)


@dataclass(slots=True)
class GridResult:
    """Result of a run.

    Attributes:
        cells: measurements of complete rounds.
        mismatches: first difference of every pass whose tokens differ from plain decoding.
        interrupted: true after a KeyboardInterrupt, with possibly fewer rounds in the last cell.
    """

    cells: list[Cell] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    interrupted: bool = False


Reference = dict[int, list[int]]  # tokens of plain decoding, by index of the request
Prepared = list[tuple[str, list[int]]]  # category and token ids of each prompt


def measure_grid(llm: LLM, workloads: Sequence[Workload], grid: Grid, advance: Callable[[str], None]) -> GridResult:
    """Measure the cells of the grid until a KeyboardInterrupt.

    Args:
        llm: engine for the largest batch and the longest draft, without block reuse, with which only the first round
            would compute the prompts.
        workloads: prompts.
        grid: settings.
        advance: function to call after every pass with a description of it.

    Raises:
        PromptTooLongError: a prompt and its output do not fit into the context.
    """
    measured = GridResult()
    try:
        for bench, reference in _benches(llm, workloads, grid):
            bench.measure(grid, reference, advance, measured)
    except KeyboardInterrupt:
        measured.interrupted = True
    return measured


def _benches(llm: LLM, workloads: Sequence[Workload], grid: Grid) -> Iterator[tuple[_Bench, Reference]]:
    for workload in workloads:
        for temperature in grid.temperatures:
            common = SamplingParams(temperature=temperature, max_tokens=grid.output_len, ignore_eos=grid.ignore_eos)
            prompts = encode_workload(llm, workload, replace(common, seed=grid.seed))
            for prompt_len in grid.prompt_lens:
                fitted = [(category, fit(ids, prompt_len)) for category, ids in prompts]
                _check_room(llm, fitted, grid.output_len)
                reference: Reference = {}  # shared by all batch sizes, which must not change tokens either
                for batch in grid.batches:
                    jobs = _jobs(fitted, common, grid.seed, batch)
                    yield _Bench(llm, workload.name, jobs, batch, prompt_len, len(fitted)), reference


def encode_workload(llm: LLM, workload: Workload, params: SamplingParams) -> Prepared:
    """Token ids of all prompts; later turns follow plain answers, which equal those of every variant."""
    prompts: Prepared = []
    plain = replace(params, speculative=RequestSpeculation(enabled=False))
    for item in workload.items:
        prompts.append((item.category, spell_turn(llm, item.source)))
        for source in _later_turns(llm, item, plain):
            prompts.append((item.category, spell_turn(llm, source)))
    return prompts


def _later_turns(llm: LLM, item: PromptItem, params: SamplingParams) -> list[Conversation]:
    if not item.later or not isinstance(item.source, Conversation):
        return []
    messages, found = list(item.source.messages), []
    for text in item.later:
        answer = llm.generate(spell_turn(llm, Conversation(messages)), params)[0].text
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]
        found.append(Conversation(messages))
    return found


def _check_room(llm: LLM, prompts: Prepared, output_len: int) -> None:
    longest = max(len(ids) for _, ids in prompts)
    if longest + output_len > llm.max_seq_len:
        raise PromptTooLongError(
            f"the longest prompt has {longest} tokens and the output {output_len}, the context holds "
            f"{llm.max_seq_len}; lower --prompt-len or --max-tokens"
        )


def _jobs(prompts: Prepared, common: SamplingParams, seed: int, batch: int) -> list[TimedRequest]:
    """Requests: all prompts once, or repeated with other seeds until the batch is full."""
    return [
        TimedRequest(*prompts[i % len(prompts)], replace(common, seed=seed + i))
        for i in range(max(len(prompts), batch))
    ]


@dataclass(frozen=True, slots=True)
class _Bench:
    """Requests of one cell on an engine."""

    llm: LLM
    workload: str
    jobs: Sequence[TimedRequest]
    batch: int
    prompt_len: int | None
    prompts: int

    def measure(self, grid: Grid, reference: Reference, advance: Callable[[str], None], measured: GridResult) -> None:
        """Measure all variants in `grid.repeat` rounds, which begin with different variants; record complete rounds."""
        variants = grid.drafts
        for drafts in variants:
            self._take(drafts, min(WARM_UP_TOKENS, grid.output_len), self.batch)
        takes: dict[DraftShape, list[Pass]] = {drafts: [] for drafts in variants}
        try:
            for number in range(grid.repeat):
                turn = number % len(variants)
                for drafts in [*variants[turn:], *variants[:turn]]:
                    takes[drafts].append(self._take(drafts, grid.output_len))
                    advance(f"{self.workload}, batch {self.batch}, {drafts}, round {number + 1}")
        finally:
            if rounds := min(map(len, takes.values())):
                self._note({drafts: own[:rounds] for drafts, own in takes.items()}, reference, measured)

    def _note(self, takes: dict[DraftShape, list[Pass]], reference: Reference, measured: GridResult) -> None:
        """Add the cell of the passes of each variant, equally many, plain decoding first."""
        plain = next(iter(takes.values()))
        for place, sample in enumerate(plain[0].samples):
            reference.setdefault(place, sample.token_ids)
        measured.mismatches += [
            found for drafts, own in takes.items() for t in own if (found := self._mismatch(reference, t, drafts))
        ]
        lengths_of = [len(job.prompt) for job in self.jobs]
        cell = Cell(
            workload=self.workload,
            temperature=self.jobs[0].params.temperature,
            batch=self.batch,
            prompt_len=self.prompt_len,
            prompts=self.prompts,
            requests=len(self.jobs),
            mean_prompt_tokens=fmean(lengths_of),
            variants=[self._variant(drafts, own, plain) for drafts, own in takes.items()],
        )
        measured.cells.append(cell)

    def _take(self, drafts: DraftShape, output_len: int, most: int | None = None) -> Pass:
        """One pass over the first `most` requests, or over all, with drafts of this shape."""
        branch(self.llm, drafts.tree_top_k)
        asked = RequestSpeculation(max_draft_len=drafts.max_draft_len, adaptive=drafts.chosen)
        jobs = [j._replace(params=replace(j.params, speculative=asked, max_tokens=output_len)) for j in self.jobs]
        return drive(self.llm, jobs[:most], self.batch)

    def _mismatch(self, reference: Reference, take: Pass, drafts: DraftShape) -> Mismatch | None:
        for place, sample in enumerate(take.samples):
            for position, (a, b) in enumerate(zip_longest(reference[place], sample.token_ids)):
                if a != b:
                    where = (self.workload, self.jobs[0].params.temperature, self.batch, drafts.max_draft_len)
                    return Mismatch(*where, place % self.prompts, position, a, b, drafts.chosen, drafts.tree_top_k)
        return None

    def _variant(self, drafts: DraftShape, own: Sequence[Pass], plain: Sequence[Pass]) -> Variant:
        """Figures of a variant over all rounds."""
        samples = [sample for take in own for sample in take.samples]
        steps = [step for take in own for step in take.steps]
        seconds = sum(take.seconds for take in own)
        tokens = sum(len(sample.token_ids) for sample in samples)
        gaps = [gap for sample in samples for gap in per_token(sample.emissions)]
        draft_s, verify_s = sum(step.draft_s for step in steps), sum(step.verify_s for step in steps)
        return Variant(
            max_draft_len=drafts.max_draft_len,
            chosen=drafts.chosen,
            tree_top_k=drafts.tree_top_k,
            method=samples[0].stats.method,
            tokens=tokens // len(own),
            round_s=[take.seconds for take in own],
            tokens_per_second=tokens / seconds,
            speed_up=ratio_interval([a.seconds / b.seconds for a, b in zip(plain, own, strict=True)]),
            acceptance=acceptance(sample.stats for sample in samples),
            ttft_s=spread([sample.ttft for sample in samples]),
            inter_token_s=spread(gaps) if gaps else None,
            prompt_share=sum(s.ttft for s in samples) / sum(s.seconds for s in samples),
            time_share=TimeShares(draft_s / seconds, verify_s / seconds, max(0.0, 1 - (draft_s + verify_s) / seconds)),
            steps=step_costs(steps),
            contexts=context_costs(steps),
            choices=choices(steps) if drafts.chosen else [],
            categories=[self._category(name, plain, own) for name in dict.fromkeys(j.category for j in self.jobs)],
        )

    def _category(self, name: str, plain: Sequence[Pass], own: Sequence[Pass]) -> Category:
        places = [place for place, job in enumerate(self.jobs) if job.category == name]

        def seconds(take: Pass) -> float:
            return sum(take.samples[place].seconds for place in places)

        ratios = [seconds(a) / seconds(b) for a, b in zip(plain, own, strict=True)]
        return Category(
            name=name,
            requests=len(places),
            tokens=sum(len(own[0].samples[place].token_ids) for place in places),
            speed_up=ratio_interval(ratios),
            acceptance=acceptance(take.samples[place].stats for take in own for place in places),
        )
