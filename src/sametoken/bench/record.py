"""Record of a run: the types of its JSON, which `report` and `explain` read back checked.

All times are in seconds; all shares and rates are in 0 .. 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from sametoken.bench.variant import STRICT, Basis, Estimate, Spread, Variant
from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError, found_wrong, shown

SCHEMA: Literal["sametoken-bench-1"] = "sametoken-bench-1"
FOREIGN_LOAD = 0.75  # of the load average, beyond our own threads


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
        """Name what decides the outputs and with them the acceptance; the batch does not."""
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
    """Environment in which a run took place.

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
        """True if other processes were busy on the machine, so that the measured times include their work."""
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
    """Write a run as `bench-<time>.json` of the directory, which is made; never over another file.

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
    """Error in a file, from an entry of `ValidationError.errors()`."""
    where = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "json_invalid":
            return f"is damaged: no complete JSON at {str(problem['ctx']['error']).rpartition(' at ')[2]}"
        case "missing":
            return f"has no {where}"
        case "unexpected_keyword_argument":
            return f"has {where}, which is unknown here"
    return f"has {where} = {shown(problem['input'])}: {found_wrong(problem)}" if where else "holds no run"
