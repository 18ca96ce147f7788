"""Step of the engine: plan -> propose -> forward -> verify -> commit -> observe -> advance.

An engine has the requests of one target, and their drafters; input and output are tokens. It is not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from sametoken.control.cost import Costs
from sametoken.drafters.base import Drafter
from sametoken.engine.blocks import BlockManager
from sametoken.engine.calibration import Calibration
from sametoken.engine.captured import CapturedSteps
from sametoken.engine.drafting import Drafting
from sametoken.engine.host import HostRunner, StepRunner
from sametoken.engine.meter import EngineLoad
from sametoken.engine.pace import Pace
from sametoken.engine.plan import Plan
from sametoken.engine.report import Done, StepReport
from sametoken.engine.request import Emission, Request
from sametoken.engine.scheduler import Scheduler
from sametoken.kernels.cpu.memory import give_back_files, release
from sametoken.kernels.cpu.threads import serial_torch
from sametoken.runtime.cache import KVCache, PageTable

__all__ = ["Engine", "EngineLoad"]


class Engine:
    """Continuous batching of speculative decoding.

    Args:
        runner: runner of the target, with the requests by row and the clocks of this engine.
        table: page table of all caches of this engine.
        blocks: owners of the pages of the table.
        drafting: drafters, and the policy that chooses among them.
        max_batch_size: number of rows.
        max_num_tokens: greatest number of tokens of a step.
        pace: limit of prompt tokens in steps that also decode.
        captured: planner and runner of captured steps; None for none.
        caches: caches of the target and of the drafters.

    Attributes:
        caches: as given.
        reports: functions that are called with the report of every step.
    """

    def __init__(
        self,
        runner: HostRunner,
        table: PageTable,
        blocks: BlockManager,
        drafting: Drafting,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        pace: Pace,
        captured: CapturedSteps | None = None,
        caches: Sequence[KVCache] = (),
    ) -> None:
        self.captured, self.max_batch_size, self.caches = captured, max_batch_size, caches
        # Between calls of the compiled kernels, small tensors are faster on one thread than on several.
        self._threads = nullcontext if runner.decoder.native is None else serial_torch
        self.runner, self.table, self.drafting = runner, table, drafting
        self.rows, self.meter = runner.rows, runner.meter
        self.scheduler = Scheduler(
            blocks,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            pace=pace,
            drafts=drafting,
        )
        self.reports: list[Callable[[StepReport], object]] = []
        self._requests: dict[int, Request] = {}
        self._aborted: list[Emission] = []  # of requests aborted since the last step

    @property
    def drafters(self) -> dict[str, Drafter]:
        """Drafters by method name."""
        return self.drafting.drafters

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def load(self) -> EngineLoad:
        """Current load; may be read from a thread that does not step the engine."""
        scheduler, meter = self.scheduler, self.meter
        pages = scheduler.blocks.pages - 1  # without the sink
        used = pages - scheduler.blocks.available
        counts = (len(scheduler.running), len(scheduler.waiting), used, pages, meter.preemptions)
        paused = "gain" if self.drafting.pauses.paused else ""
        remembered = sum(drafter.remembered for drafter in self.drafting.drafters.values())
        return EngineLoad(*counts, meter.draft_len, paused, *meter.totals, remembered)

    def add(self, request: Request) -> None:
        """Queue a request, which starts as soon as there is room."""
        self._requests[request.id] = request
        self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """End a request now and free its row and pages; do nothing for an unknown or finished request."""
        request = self._requests.get(request_id)
        if request is not None:
            request.stop("abort", None)
            self._retire(request)
            self._aborted.append(Emission.end(request))

    def give_back(self, files: bool = False) -> None:
        """Free memory while there are no requests; cached prefixes must be computed again later.

        Args:
            files: true to also drop weights in mapped files from memory, which the next step reads again.
        """
        if not self.busy:
            self.scheduler.blocks.forget()
            for cache in self.caches:
                cache.clear()
            release()
            if files:
                give_back_files()

    def calibrate(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Measure the cost of drafts on this machine in about 0.3 seconds, once, if there are drafters.

        Without this call, the measurement delays the first request with an adaptive draft length.

        Args:
            stop: function that returns true if a request waits: then only the most important measurements are made.
        """
        scheduler, policy = self.scheduler, self.drafting.policy
        if policy.costs is not None or not scheduler.free_rows or not self.drafters:
            return
        most = min(scheduler.max_num_tokens, (self.table.spare + 1) * (1 + policy.longest))
        context = self.table.table.shape[1] * self.table.page_size
        experts = self.runner.decoder.config.experts
        with self._threads():
            measured = Calibration(self.runner, scheduler.free_rows, most, context).measure(
                self.drafters, policy.longest, stop
            )
        policy.costs = Costs(measured, float if experts is None else experts.work)

    def step(self) -> StepReport:
        """Run one step over the batch and return its report."""
        with self._threads():
            plan = self._plan()
            proposal = self.drafting.propose(plan)
            done = self._runner(plan).run(plan, proposal)
            self.drafting.observe(done)
            report = self.meter.report(done, self._advance(done))
        for listener in self.reports:
            listener(report)
        return report

    def _plan(self) -> Plan:
        """Plan the next step, and assign its rows to requests."""
        plan = None if self.captured is None else self.captured.plan(self.scheduler)
        if plan is None and any(request.adaptive for request in self.scheduler.waiting):
            self.calibrate()
        self.meter.begin()
        if plan is None:
            plan = self.scheduler.plan()
        for row in plan.preempted:
            self._leave(row)
        for row, request_id, cached, draft_cached in plan.admitted:
            request = self.rows[row] = self._requests[request_id]
            request.last_row = row
            if not request.started:  # a preempted request reuses its own pages, which is no saving
                request.cached_tokens, request.started, request.seated = cached, True, time.perf_counter()
            self.drafting.admit(row, request, cached, draft_cached)
        for row, pages in plan.pages:
            self.table.extend(row, pages)
        return plan

    def _runner(self, plan: Plan) -> StepRunner:
        """Runner of a plan: of captured steps or of the host."""
        return self.captured if plan.captured and self.captured is not None else self.runner

    def _advance(self, done: Done) -> list[Emission]:
        """Update the scheduler and release the requests that ended."""
        emissions, self._aborted = self._aborted, []
        for emission in self.scheduler.advance(done):
            emissions.append(emission)
            if emission.finished:
                with self.meter.aside:
                    self._retire(emission.request)
        return emissions

    def _leave(self, row: int) -> None:
        request = self.rows.pop(row)
        self.table.clear(row)
        self.drafting.release(row, request)

    def _retire(self, request: Request) -> None:
        del self._requests[request.id]
        row = request.row
        self.scheduler.finish(request)
        if row is not None:
            self._leave(row)
        self.drafting.end(request)
