"""Measurement of the cost of steps and drafts on this machine, on rows that no request uses.

It runs the real target and the real drafters for a fraction of a second. Their keys and values go to the sink page,
which is never read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from sametoken.control.cost import Measured
from sametoken.drafters.base import Drafter
from sametoken.drafters.padded import chain
from sametoken.engine.plan import Decode, Plan
from sametoken.engine.runner import Runner
from sametoken.options.sampling import SamplingParams
from sametoken.speculation.sampling import RowSampling, Sampling

COUNTS = (1, 16, 64, 4, 8, 32, 2, 128, 256)  # tokens of a forward, the most informative counts first
TELLING = 3  # counts that are always measured, unless one alone exceeds the budget
GUESSED = 0.25  # assumed cost of a token of a forward, in plain steps, before any is measured
BUDGET, STEPS = 0.3, 4  # seconds, or number of plain steps if these take longer
ROUNDS = 4  # limit of rounds; the shortest time counts, since disturbances only add time and the first run is cold
NEAR, FAR = 32, 480  # tokens of context, to measure the cost of context
TOKEN_STEP = 7919  # distance of token ids: a prime, for many different ids in a vocabulary
FED = 64  # tokens read to measure the cost of reading

Times = dict[tuple[object, ...], float]
Work = tuple[tuple[object, ...], Callable[[], object]]


class Calibration:
    """One measurement of target and drafters.

    Args:
        runner: runner of the target.
        rows: free rows of the page table; at least one.
        most: tokens of the largest forward of interest.
        context: longest sequence in tokens.
    """

    def __init__(self, runner: Runner, rows: Sequence[int], most: int, context: int) -> None:
        self.runner, self.rows = runner, list(rows)
        self._counts = [count for count in COUNTS if count <= max(most, COUNTS[1])]
        self.far = max(NEAR + 1, min(FAR, context - max(COUNTS)))
        self._telling = self._counts[:TELLING]
        self._vocab = runner.decoder.config.vocab_size
        self._sampling = RowSampling(SamplingParams(temperature=0), 0, [0], self._vocab, [], [], runner.device)

    def measure(
        self, drafters: Mapping[str, Drafter], longest: int, stop: Callable[[], bool] = lambda: False
    ) -> Measured:
        """Time forwards, and drafts of up to `longest` tokens by the drafters that run a model, in turns.

        Args:
            drafters: drafters by method.
            longest: longest draft in tokens.
            stop: function that returns true to end after the measurements that are always made.
        """
        models = {method: drafter for method, drafter in drafters.items() if drafter.runs_model}
        for drafter in models.values():  # the first run loads weights into memory
            self._propose(drafter, 1, 1)
        # Wall time: the CPU time of this thread does not include the work of other threads while it waits.
        begin = time.perf_counter()
        self._step(1, 1, NEAR)
        plain = time.perf_counter() - begin
        budget = max(BUDGET, STEPS * plain)
        self._telling = [count for count in self._counts[:TELLING] if GUESSED * count * plain <= budget]
        telling, rest = self._works(models, longest)
        times: Times = {}
        for lap in range(ROUNDS):
            for key, work in rest + telling if lap else telling:
                start = time.perf_counter()
                expected = times.get(key, GUESSED * plain * self._tokens(key))
                if lap and (start + expected > begin + budget or stop()):
                    continue
                work()
                seconds = time.perf_counter() - start
                times[key] = min(seconds, times.get(key, seconds))
        return self._costs(times, models, longest)

    def _works(self, models: Mapping[str, Drafter], longest: int) -> tuple[list[Work], list[Work]]:
        """Measurements that are always made (forwards and drafts in turns), and those made if there is time."""
        steps: list[Work] = []
        for count in self._counts:
            rows = self._rows(count)
            steps.append((("step", count), partial(self._step, rows, count // rows, NEAR)))
        wide: Work = (("near",), partial(self._step, self._many, 1, NEAR))
        drafts: list[Work] = []
        for method, drafter in models.items():
            for rows in sorted({1, len(self.rows)}):
                for length in sorted({1, longest}):
                    drafts.append(((method, rows, length), partial(self._propose, drafter, rows, length)))
        many = len(self._telling)
        turns = zip_longest([*steps[:many], wide], drafts)
        telling = [work for pair in turns for work in pair if work is not None]
        rest: list[Work] = [(("feed", m), partial(self._read, drafter)) for m, drafter in models.items()]
        rest.append((("far",), partial(self._step, self._many, 1, self.far)))
        return telling, steps[many:][:3] + rest + steps[many:][3:]

    def _tokens(self, key: tuple[object, ...]) -> int:
        """Tokens of the target's forward in a measurement, 1 for a draft."""
        return int(str(key[1])) if key[0] == "step" else self._many if key[0] in ("near", "far") else 1

    def _rows(self, count: int) -> int:
        """Number of rows for `count` tokens of a forward, four tokens each."""
        return min(len(self.rows), max(1, count // 4))

    @property
    def _many(self) -> int:
        """Rows of the plain step that measures the cost of a row; its tokens are also measured in fewer rows."""
        return max((count for count in self._telling if count <= len(self.rows)), default=1)

    def _costs(self, times: Times, models: Mapping[str, Drafter], longest: int) -> Measured:
        """Costs computed from the measured times; a cost that was not measured is 0 until steps measure it."""
        first: dict[str, dict[int, float]] = {}
        level: dict[str, dict[int, float]] = {}
        feed: dict[str, float] = {}
        for method in models:
            first[method], level[method] = {}, {}
            most = max(1, len(self.rows))  # a token in each of as many rows costs no less than a prompt token
            feed[method] = times[("feed", method)] / FED if ("feed", method) in times else times[method, most, 1] / most
            for rows in {1, len(self.rows)}:
                short, long = times[method, rows, 1], times[method, rows, longest]
                level[method][rows] = max(0.0, long - short) / (longest - 1) if longest > 1 else short / 2
                first[method][rows] = max(1e-9, short - level[method][rows])
        steps = {int(str(key[1])): seconds for key, seconds in times.items() if key[0] == "step"}
        fewer = self._rows(self._many)
        row = max(0.0, times[("near",)] - steps.get(self._many, times[("near",)])) / max(1, self._many - fewer)
        step = {count: max(1e-9, seconds - row * self._rows(count)) for count, seconds in steps.items()}
        more = max(0.0, times[("far",)] - times[("near",)]) if ("far",) in times else 0.0
        return Measured(step, row, more / (self._many * (self.far - NEAR)), first, level, feed)

    def _together(self, rows: int) -> Sampling:
        return Sampling.of([self._sampling] * rows)

    def _step(self, rows: int, nodes: int, context: int) -> None:
        """Run a forward of `rows` trees of `nodes` tokens each, all different: equal tokens choose equal experts."""
        tokens = [index * TOKEN_STEP % self._vocab for index in range(rows * nodes)]
        guesses = [chain(tokens[first + 1 : first + nodes]) for first in range(0, len(tokens), nodes)]
        plan = Plan(decode=tuple(Decode(row, 0, start=context) for row in self.rows[:rows]))
        self.runner.forward(plan, tokens[::nodes], guesses, lambda at: self._together(len(at)))

    def _propose(self, drafter: Drafter, count: int, length: int) -> None:
        """Draft `length` tokens for each of the first `count` rows."""
        rows = self.rows[:count]
        for row in rows:
            drafter.admit(row, [])
        if drafter.taps:  # drafts from a feature
            drafter.observe(rows, [[0]] * count, self._features(drafter, count))
        drafter.propose(rows, [0] * count, [length] * count, self._together(count))
        for row in rows:
            drafter.release(row)

    def _read(self, drafter: Drafter) -> None:
        """Run the reading of a prompt of `FED` tokens by a drafter."""
        row = self.rows[0]
        drafter.admit(row, [])
        drafter.observe([row], [[0] * FED], self._features(drafter, FED))
        drafter.catch_up([row])
        drafter.release(row)

    def _features(self, drafter: Drafter, count: int) -> Tensor | None:
        """Hidden states of `count` tokens in the form that a drafter observes, all zero."""
        width = len(drafter.taps) * self.runner.decoder.config.hidden_size
        zeros = torch.zeros(count, width, dtype=self.runner.decoder.dtype, device=self.runner.device)
        return zeros if drafter.taps else None
