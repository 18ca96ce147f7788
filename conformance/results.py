"""What a comparison found, and how it is kept: results.json, and the table in docs/conformance.md."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOGITS = 1e-4  # largest difference allowed, in standard deviations of the peer's logits; float32 rounding is about 1e-5

HEADER = """# Conformance

Compared with code that is not ours. `make conformance` writes this page; it builds an environment for every peer under
`.conformance/` and takes {minutes:.0f} minutes on two cores once they are there. A difference of logits is the largest
of all positions and unrolled steps, in standard deviations of the peer's logits; {limit:.0e} is the limit.

SGLang and TensorRT-LLM are not here. Both need CUDA: `sglang` 0.5.23 depends on flashinfer, flash-attn-4 and CUDA's
bindings; `pip install tensorrt_llm` (1.2.1) fails while it fetches a CUDA wheel. How they read an export is restated in
`tests/engine_rules.py` and checked in every test run. llama.cpp needs `CONFORMANCE_OPTIONS="--llama-cpp DIR"`, a source
tree with `llama-server` in build/bin.

**agrees**: within the limit. **as documented**: the peer refuses or differs for a reason that is stated, and the
statement itself was tested. **differs**: neither.
"""


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        peer: whose code stands on the other side.
        case: which head.
        compared: what is compared with what.
        found: figures or the peer's error, for a reader.
        outcome: "agrees", "as documented" or "differs".
    """

    peer: str
    case: str
    compared: str
    found: str
    outcome: str


def judged(peer: str, case: str, compared: str, found: str, holds: bool, *, known: bool = False) -> Result:
    """A result that agrees if `holds`; `known` says that what holds is a difference we document."""
    return Result(peer, case, compared, found, ("as documented" if known else "agrees") if holds else "differs")


def distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Largest difference of pairs of logits, each in standard deviations of `theirs`; NaN counts as infinite."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape:
            raise ValueError(f"logits are {tuple(mine.shape)} here and {tuple(other.shape)} there: nothing to compare")
        apart = ((mine - other).abs().max() / other.std()).item()
        worst = max(worst, math.inf if math.isnan(apart) else apart)
    return worst


def compare_logits(peer: str, case: str, compared: str, ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> Result:
    apart = distance(ours, theirs)
    return judged(peer, case, compared, f"{apart:.1e}", apart <= LOGITS)


@dataclass(frozen=True)
class Comparison:
    """One peer's comparisons, its versions by package, and how long they took."""

    results: list[Result]
    versions: Mapping[str, str]
    seconds: float


def keep(peer: str, found: Comparison, work: Path, page: Path) -> None:
    """Puts a peer's comparisons in the place of its earlier ones in results.json, and writes the page of all."""
    file = work / "results.json"
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    kept[peer] = asdict(found)
    file.write_text(json.dumps(kept, indent=1) + "\n")
    for entry in kept.values():
        entry["results"] = [Result(**result) for result in entry["results"]]
    page.write_text(markdown({name: Comparison(**entry) for name, entry in kept.items()}))


def markdown(peers: Mapping[str, Comparison]) -> str:
    """The page."""
    minutes = max(1.0, sum(found.seconds for found in peers.values()) / 60)
    lines = [HEADER.format(minutes=minutes, limit=LOGITS)]
    lines.append(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}.")
    for peer in sorted(peers):
        named = ", ".join(f"{name} {version}" for name, version in peers[peer].versions.items())
        lines += ["", f"## {peer}", "", f"{named}.", "", "| head | compared | found | |", "|---|---|---|---|"]
        rows = peers[peer].results
        lines += [f"| {row.case} | {row.compared} | {_cell(row.found)} | {row.outcome} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
