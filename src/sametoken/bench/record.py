"""Record of a run: types of its JSON, checked reading of it, and the environment of this process.

All times are in seconds; all shares and rates are in 0 .. 1.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

import sametoken
from sametoken.bench.variant import STRICT, Basis, Estimate, Spread, Variant
from sametoken.check.machine import package_versions, processor_name
from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError, found_wrong, shown

SCHEMA: Literal["sametoken-bench-1"] = "sametoken-bench-1"
FOREIGN_LOAD = 0.75  # load average in excess of the engine's threads that marks a busy machine


@dataclass(frozen=True, config=STRICT)
class Cell:
    """Workload under one setting.

    Attributes:
        prompt_len: tokens that prompts were fitted to; None for prompts as they are.
        prompts: number of different prompts.
        requests: requests of one round; prompts repeat with other seeds until the batch is full.
        variants: measurements, plain decoding first.
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
        """Description of the setting without the batch size, on which outputs do not depend."""
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
        """Variants with drafts of one length and number of branches."""
        return [variant for variant in self.speculative if not variant.chosen]

    @property
    def fixed(self) -> Sequence[Variant]:
        """Variants of one length with the fewest branches: chains, unless only trees were measured."""
        fewest = min(variant.tree_top_k for variant in self.shaped)
        return [variant for variant in self.shaped if variant.tree_top_k == fewest]

    @property
    def chosen(self) -> Variant | None:
        """Variant of the controller, if it was measured."""
        return next((variant for variant in self.speculative if variant.chosen), None)


@dataclass(frozen=True, config=STRICT)
class Load:
    """One server under one load.

    Attributes:
        side: "server" or "baseline".
        kind: "closed" keeps `level` requests open, "open" starts `level` requests per second at Poisson times.
        requests: requests of one round.
        failures: number of failed requests by reason.
        latency_s: time from the due time of a request to its end, with the wait for a connection.
        ttft_s: time from the due time of a request to its first text.
        per_token_s: of each request, seconds after its first emission / tokens after it.
        inter_token_s: see `Variant`.
        inter_token_basis: "estimated" if the server counts tokens only once per request, and they are divided among
            chunks in proportion to characters.
        speed_up: baseline / server, paired by round: time per output token of a closed load, mean latency of an open
            one, whose token rate follows from the arrivals.
        equal_texts: share of requests with a text equal to the baseline's.
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
    """First token that differs from plain decoding of an equal request.

    Attributes:
        max_draft_len: see `Variant`.
        prompt: index of the prompt.
        position: index of the output token.
        plain: token of plain decoding; None past its end.
        found: token of this variant; None past its end.
        chosen: see `Variant`.
        tree_top_k: see `Variant`.
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
        load_before: load average of the machine before the run.
        load_after: load average of the machine after the run.
        kernels: name of the compiled kernels, "none" if torch computed alone; None for a server.
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
        """True if other processes were busy on the machine, which lengthens the measured times."""
        return self.threads is not None and self.load > self.threads + FOREIGN_LOAD


@dataclass(frozen=True, config=STRICT)
class Run:
    """One call of `sametoken bench`.

    Attributes:
        kind: "engine" for an engine of this process, "server" for servers over HTTP.
        settings: values of all options.
        basis: origin of each figure, by its name.
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
    """Write a run as `bench-<time>.json` into a directory, which is created; existing files are not replaced.

    Raises:
        ConfigError: the file cannot be written.
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
    """Runs of files and directories, the oldest first.

    Raises:
        ConfigError: a directory has no run, or a file is not a run.
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
        advice = "expected a file of this version's `sametoken bench --out`; measure again"
        raise ConfigError(f"{file} {_damage(error.errors()[0])}; {advice}") from error


def _damage(problem: Mapping[str, Any]) -> str:
    """Description of an entry of `ValidationError.errors()`."""
    where = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "json_invalid":
            return f"is damaged: no complete JSON at {str(problem['ctx']['error']).rpartition(' at ')[2]}"
        case "missing":
            return f"has no {where}"
        case "unexpected_keyword_argument":
            return f"has {where}, which is unknown here"
    return f"has {where} = {shown(problem['input'])}: {found_wrong(problem)}" if where else "holds no run"


def load_average() -> float:
    """Mean number of runnable processes over the last minute; 0 on systems without a load average."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def describe_environment(device: str, dtype: str | None, threads: int | None, load_before: float) -> Environment:
    """Environment of this process.

    Args:
        device: device of the engine, or URL of the server.
        dtype: data type of the engine; None for a server.
        threads: threads of the engine; None for a server.
        load_before: `load_average()` before the run.
    """
    return Environment(
        sametoken=sametoken.__version__,
        commit=_commit(Path(sametoken.__file__).resolve().parent),
        command=shlex.join(["sametoken", *_without_secrets(sys.argv[1:])]),
        versions={"python": platform.python_version(), **package_versions()},
        platform=platform.platform(),
        cpu=processor_name(),
        cores=os.cpu_count() or 1,
        device=device,
        dtype=dtype,
        threads=threads,
        load_before=load_before,
        load_after=load_average(),
        kernels=None if threads is None else _kernels(),
    )


def _kernels() -> str:
    from sametoken.kernels.cpu.variant import status

    return status().variant or "none"


def _without_secrets(arguments: list[str]) -> list[str]:
    """Words of a command line with API keys replaced by ***."""
    hidden, words = False, []
    for word in arguments:
        name, equals, _ = word.partition("=")
        is_key = name.replace("_", "-") == "--api-key"
        words.append("***" if hidden else f"{name}=***" if is_key and equals else word)
        hidden = is_key and not equals
    return words


def _commit(package: Path) -> str | None:
    """Commit of the package's checkout, with "-dirty" if files differ from it; None outside a checkout."""
    root = package.parents[1]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
