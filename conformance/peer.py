"""Running a peer's script in its own environment, and reading what it left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "peers"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


class PeerError(Exception):
    """A peer's script ended without a result; the message names its log."""


def run(python: Path, script: str | Path, arguments: list[str | Path], log: Path) -> None:
    """Runs a script, by default one of `peers/`, to its end.

    Raises:
        PeerError: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    command = [str(python), str(SCRIPTS / script), *map(str, arguments)]
    with log.open("w") as file:
        ended = subprocess.run(command, env={**kept, **OFFLINE}, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        raise PeerError(f"{script} ended with {ended.returncode}; its output is in {log}")


def answer(file: Path) -> dict[str, Any]:
    """The JSON object that a script left."""
    found: dict[str, Any] = json.loads(file.read_text())
    return found
