"""Environment of a run: versions, commit, command, machine and its load."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import sametoken
from sametoken.bench.record import Environment
from sametoken.check.machine import package_versions, processor_name


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
