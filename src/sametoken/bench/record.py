"""What a run leaves behind: the types of its JSON, which `report` and `explain` read back checked.

All times are in seconds; all shares and rates are in 0 .. 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError, found_wrong, shown

SCHEMA: Literal["sametoken-bench-1"] = "sametoken-bench-1"
Basis = Literal["measured", "estimated"]
STRICT = ConfigDict(extra="forbid")
FOREIGN_LOAD = 0.75  # of the load average, beyond our own threads


@dataclass(frozen=True, config=STRICT)
class Estimate:
    """A figure and its 95 % confidence interval, which one round does not have."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, config=STRICT)
class Spread:
    """Mean and percentiles of a sample."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, config=STRICT)
class Position:
    """What became of the guesses at one place of a draft.

    Attributes:
        position: from 1, the guess right after the pending token.
        drafted: forwards with a guess there. `tried`: those of them that accepted all guesses before it.
        accepted: forwards that accepted it.
        unconditional: accepted / drafted. `conditional`: accepted / tried, None where nothing came so far.
    """

    position: int
    drafted: int
    tried: int
    accepted: int
    unconditional: float
    conditional: float | None


@dataclass(frozen=True, config=STRICT)
class Expectation:
    """Guesses of one drafter of which about the same chance was expected, once all before them had come true.

    Attributes:
        low, high: the chances of this bin.
        tried: guesses. `expected`: their mean chance. `accepted`: the share of them that came true.
    """

    drafter: str
    low: float
    high: float
    tried: int
    expected: float
    accepted: float


@dataclass(frozen=True, config=STRICT)
class AcceptanceTable:
    """What speculation did over many requests.

    Attributes:
        rate: accepted / drafted tokens.
        length: tokens emitted per target forward, bonus included.
        forwards_per_token: target forwards per emitted token of a request.
        accepted_lengths: a histogram: `accepted_lengths[a]` is the number of forwards that accepted a draft tokens.
        drafted_lengths: the same of drafts: `drafted_lengths[d]` forwards had d draft tokens on the longest path.
        drafted_by, plain: forwards with a draft by drafter, and without one by reason, see `SpeculationStats`.
        reliability: expected against real acceptance, where a drafter says how clearly its guesses won their draws.
    """

    rate: float
    length: float
    forwards_per_token: float
    forwards: int
    emitted: int
    drafted: int
    accepted: int
    accepted_lengths: list[int]
    drafted_lengths: list[int]
    positions: list[Position]
    drafted_by: dict[str, int] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    reliability: list[Expectation] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class TimeShares:
    """Where the wall time went: making and feeding drafts, the target's forward with verification, the rest."""

    draft: float
    verify: float
    host: float


@dataclass(frozen=True, config=STRICT)
class StepCost:
    """Decoding steps of so many rows: median seconds by part."""

    rows: int
    steps: int
    draft_s: float
    verify_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.host_s


@dataclass(frozen=True, config=STRICT)
class ContextCost:
    """Decoding steps whose mean context was `low` .. `high` - 1 tokens: median seconds, tokens per row and step."""

    low: int
    high: int
    steps: int
    step_s: float
    tokens_per_row: float


@dataclass(frozen=True, config=STRICT)
class Choice:
    """Decoding steps in which the longest draft that any row was allowed had `draft_len` tokens; 0 for no draft.

    Attributes:
        step_s: median seconds of those with the commonest number of rows.
        tokens_per_row: that a step emits, the bonus token included.
        expected_cost: plain steps that the controller expected such a step to take, on average; None where it did not.
    """

    draft_len: int
    steps: int
    step_s: float
    tokens_per_row: float
    expected_cost: float | None = None


@dataclass(frozen=True, config=STRICT)
class Category:
    """One category of a workload; its speed-up is of the requests' own seconds, from arrival to last token."""

    name: str
    requests: int
    tokens: int
    speed_up: Estimate
    acceptance: AcceptanceTable


@dataclass(frozen=True, config=STRICT)
class Variant:
    """One way to decode the prompts of a cell.

    Attributes:
        max_draft_len: longest draft; 0 is plain decoding.
        chosen: the controller chose the length of every step, up to `max_draft_len`; else all drafts had that length.
        choices: the lengths that it chose, the shortest first; empty where it was off.
        tree_top_k: branches of each level of a draft; 1 is a chain.
        tokens: of one round. `round_s`: wall time of each round.
        prompt_share: share of the requests' time before the first token, which no draft shortens.
        inter_token_s: gaps between emissions over the tokens of the later one, each token counted.
        speed_up: plain time / this time, round by round.
    """

    max_draft_len: int
    method: str
    tokens: int
    round_s: list[float]
    tokens_per_second: float
    speed_up: Estimate
    acceptance: AcceptanceTable
    ttft_s: Spread
    inter_token_s: Spread | None
    prompt_share: float
    time_share: TimeShares
    steps: list[StepCost]
    contexts: list[ContextCost]
    categories: list[Category]
    chosen: bool = False
    choices: list[Choice] = field(default_factory=list)
    tree_top_k: int = 1

    @property
    def label(self) -> str:
        return "plain" if self.max_draft_len == 0 else f"{self.method} {self.shape}"

    @property
    def shape(self) -> str:
        """Of its drafts: "4", "4x2" for a tree with 2 branches a level, or "chosen"."""
        branches = f"x{self.tree_top_k}" if self.tree_top_k > 1 else ""
        return "chosen" if self.chosen else f"{self.max_draft_len}{branches}"


@dataclass(frozen=True, config=STRICT)
class Cell:
    """A workload under one setting, plain decoding first.

    Attributes:
        requests: of one round; prompts are taken again, with other seeds, until the batch is full.
    """

    workload: str
    temperature: float
    batch: int
    prompt_len: int | None
    prompts: int
    requests: int
    mean_prompt_tokens: float
    variants: list[Variant]

    @property
    def texts(self) -> str:
        """Names what decides the outputs and with them the acceptance; the batch does not."""
        prompt = "" if self.prompt_len is None else f", prompts of {self.prompt_len}"
        return f"{self.workload}, temperature {self.temperature:g}{prompt}"

    @property
    def label(self) -> str:
        return f"{self.texts}, batch {self.batch}"

    @property
    def plain(self) -> Variant:
        return self.variants[0]

    @property
    def speculative(self) -> Sequence[Variant]:
        return self.variants[1:]

    @property
    def shaped(self) -> Sequence[Variant]:
        """Those whose drafts have one length and number of branches."""
        return [variant for variant in self.speculative if not variant.chosen]

    @property
    def fixed(self) -> Sequence[Variant]:
        """Those of one length that have the fewest branches, so chains unless only trees were measured."""
        fewest = min(variant.tree_top_k for variant in self.shaped)
        return [variant for variant in self.shaped if variant.tree_top_k == fewest]

    @property
    def chosen(self) -> Variant | None:
        """The controller's, if it was measured."""
        return next((variant for variant in self.speculative if variant.chosen), None)


@dataclass(frozen=True, config=STRICT)
class Load:
    """One server under one load.

    Attributes:
        side: "server" or "baseline".
        kind: "closed" keeps `level` requests going, "open" starts `level` requests per second at Poisson times.
        failures: how many requests ended badly, by reason.
        latency_s, ttft_s: from when a request was due, so waiting for a connection counts.
        per_token_s: of each request, seconds after its first token / tokens after it.
        inter_token_s: as of a `Variant`; `inter_token_basis` is "estimated" where the server sends usage only once and
            tokens are shared among chunks by their characters.
        speed_up: baseline / this, round by round: of the time per output token for a closed load, of the mean latency
            for an open one, whose token rate is the arrivals'.
        equal_texts: share of requests whose text is the baseline's.
    """

    workload: str
    side: Literal["server", "baseline"]
    kind: Literal["closed", "open"]
    level: float
    temperature: float
    requests: int
    failures: dict[str, int]
    round_s: list[float]
    tokens: int
    tokens_per_second: float
    latency_s: Spread
    ttft_s: Spread
    per_token_s: Spread | None
    inter_token_s: Spread | None
    inter_token_basis: Basis
    speed_up: Estimate | None
    equal_texts: float | None

    @property
    def label(self) -> str:
        return f"concurrency {self.level:g}" if self.kind == "closed" else f"{self.level:g} requests/s"


@dataclass(frozen=True, config=STRICT)
class Mismatch:
    """The first token that differs from the reference, plain decoding of the same request; None past an end.

    Attributes:
        max_draft_len, chosen, tree_top_k: as a `Variant` has them.
    """

    workload: str
    temperature: float
    batch: int
    max_draft_len: int
    prompt: int
    position: int
    plain: int | None
    found: int | None
    chosen: bool = False
    tree_top_k: int = 1


@dataclass(frozen=True, config=STRICT)
class Environment:
    """Where a run took place.

    Attributes:
        load_before, load_after: load averages of the machine, which show who else was at work.
        kernels: the compiled kernels that computed in this process, "none" where torch did alone; None for a server.
    """

    sametoken: str
    commit: str | None
    command: str
    versions: dict[str, str]
    platform: str
    cpu: str
    cores: int
    device: str
    dtype: str | None
    threads: int | None
    load_before: float
    load_after: float
    kernels: str | None = None

    @property
    def load(self) -> float:
        return max(self.load_before, self.load_after)

    @property
    def busy(self) -> bool:
        """Whether other processes were at work on the machine, so that the measured times include their work."""
        return self.threads is not None and self.load > self.threads + FOREIGN_LOAD


@dataclass(frozen=True, config=STRICT)
class Run:
    """One call of `sametoken bench`.

    Attributes:
        kind: "engine" measured in this process, "server" over HTTP.
        settings: what the user chose, all options that were read.
        basis: whether a figure was measured or estimated, by its name.
    """

    schema: Literal["sametoken-bench-1"]
    kind: Literal["engine", "server"]
    created: str
    environment: Environment
    seed: int
    settings: dict[str, Any]
    notes: list[str]
    basis: dict[str, Basis]
    cells: list[Cell]
    loads: list[Load]
    mismatches: list[Mismatch]


RUN: TypeAdapter[Run] = TypeAdapter(Run)


def write_run(run: Run, directory: Path) -> Path:
    """Writes a run as `bench-<time>.json` of the directory, which is made; never over another file.

    Raises:
        ConfigError: it cannot be written there.
    """
    stem = f"bench-{run.created.replace(':', '').replace('+0000', 'Z')}"
    names = (f"{stem}{suffix}.json" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = next(path for name in names if not (path := directory / name).exists())
        file.write_bytes(RUN.dump_json(run, indent=1))
    except OSError as error:
        raise ConfigError(f"--out {directory}: {error.strerror}; expected a directory that can be written") from error
    return file


def read_runs(places: Sequence[str]) -> list[Run]:
    """The runs of files and directories, the oldest first.

    Raises:
        ConfigError: there is none, or a file is not a run.
    """
    files: list[Path] = []
    for place in places:
        path = user_path(place)
        found = sorted(path.glob("bench-*.json")) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"{place} holds no bench-*.json; expected what `sametoken bench --out {place}` writes")
        files += found
    return sorted((_read_run(file) for file in dict.fromkeys(files)), key=lambda run: run.created)


def _read_run(file: Path) -> Run:
    try:
        return RUN.validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; expected a JSON file of `sametoken bench --out`") from error
    except ValidationError as error:
        advice = "expected what this version's `sametoken bench --out` writes; measure again"
        raise ConfigError(f"{file} {_damage(error.errors()[0])}; {advice}") from error


def _damage(problem: Mapping[str, Any]) -> str:
    """What is wrong with a file, from an entry of `ValidationError.errors()`."""
    where = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "json_invalid":
            return f"is damaged: no complete JSON at {str(problem['ctx']['error']).rpartition(' at ')[2]}"
        case "missing":
            return f"has no {where}"
        case "unexpected_keyword_argument":
            return f"has {where}, which is unknown here"
    return f"has {where} = {shown(problem['input'])}: {found_wrong(problem)}" if where else "holds no run"
