"""What stands beside llama.cpp's tests of its server: a plugin of pytest, loaded before their module `utils`.

A server that a test starts is `sametoken llama-server` with the same command line, but that a model of the Hub is a
file or directory by that name. One that the next test asks for again goes on, which saves a start for most tests. What
a test says of the texts of its own tiny model holds of any text here.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NAMED, PORT = Path(os.environ["PEER_NAMED"]), "8391"
LIMITS = ("--kv-cache-max-tokens", "16384", "--drain-seconds", "3")  # little memory, and an end before theirs
OF_THE_HUB = ("--hf-repo", "--model-url", "--model-draft")


def translated(command: Sequence[str]) -> list[str]:
    """Their command line with our program, and paths for models of the Hub."""
    found, rest = [os.environ["SAMETOKEN"], "llama-server"], list(command[1:])
    while rest:
        option = rest.pop(0)
        if option in OF_THE_HUB:
            name = rest.pop(0)
            path = (NAMED / name.removeprefix("https://huggingface.co/")).resolve()  # a file is known by its suffix
            found += ["--model-draft" if option == "--model-draft" else "--model", str(path)]
        elif option == "--hf-file":
            rest.pop(0)
        else:
            found.append(option)
    return [*found, *LIMITS]


class _Kept:
    """A server that runs on when its test ends it, until another command line is asked for."""

    command: Sequence[str] = ()
    process: subprocess.Popen[Any] | None = None

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.pid, self.poll = process.pid, process.poll

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def terminate(self) -> None:
        """Nothing: see `stop`."""

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        return 0

    @classmethod
    def stop(cls) -> None:
        """Ends the server that was kept."""
        process, cls.process = cls.process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(command: Sequence[str], **options: Any) -> Any:
    """`Popen` for their servers; one with a log of its own is always new."""
    command = translated(command)
    kept = _Kept.process
    usual = options.get("stdout") is sys.stdout
    if usual and kept is not None and kept.poll() is None and _Kept.command == command:
        return _Kept(kept)
    _Kept.stop()
    print("started:", *command, flush=True)
    process = subprocess.Popen(command, **options)
    if not usual:
        return process
    _Kept.command, _Kept.process = command, process
    return _Kept(process)


def _prepare(utils: Any) -> None:
    """Puts ours in the place of what needs their program, the network or their model."""
    utils.subprocess = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)
    utils.match_regex = lambda regex, text: bool(text)
    utils.download_file = lambda url, output_file_path=None: url
    utils.ServerPreset.load_all = staticmethod(lambda: None)


os.environ |= {"PORT": PORT, "LLAMA_CACHE": "tmp"}
sys.path.insert(0, os.getcwd())  # where their module `utils` is
sys.modules.setdefault("wget", ModuleType("wget"))
_prepare(importlib.import_module("utils"))


def pytest_unconfigure() -> None:
    _Kept.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what they run by hand: large models, many minutes."""
    items[:] = [item for item in items if item.get_closest_marker("slow") is None]
