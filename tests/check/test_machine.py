"""What a user is told of the machine: by doctor, by the server, in records of benchmarks, and where kernels lack."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import Pair
from sametoken import LLM, ConfigError
from sametoken.bench.record import describe_environment
from sametoken.check.machine import describe_machine
from sametoken.engine.load import note_missing_kernels
from sametoken.kernels.cpu.variant import KernelStatus
from server_checks import running


def test_doctor_without_a_head_describes_the_machine(run: Any) -> None:
    found = json.loads(run("doctor", "--json").out)
    flags = {word for line in Path("/proc/cpuinfo").read_text().splitlines()[:40] for word in line.split()}
    assert set(found["features"]) <= flags | {"asimd", "asimddp", "bf16", "i8mm"}
    assert found["torch"] == torch.__version__
    assert found["cores"] == os.cpu_count()
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert found["memory"] == pytest.approx(int(meminfo["MemTotal"].split()[0]) * 1024, rel=0.01)
    assert 0 < found["memory_free"] <= found["memory"]
    assert found["versions"]["tokenizers"]
    assert set(found["versions"]) >= {"sametoken", "python", "torch"}
    shown = " ".join(run("doctor").out.split())
    assert found["cache"] in shown
    assert (found["kernels"] or "torch computes alone") in shown


def test_options_of_a_head_are_refused_without_one(run: Any) -> None:
    assert "--target is for a head: give HEAD too" in run("doctor", "--target", "embedded").err


def test_without_kernels_the_reason_and_the_command_are_named() -> None:
    """In a process of its own, since kernels are looked up once; and one note however many models are loaded."""
    env = {**os.environ, "SAMETOKEN_NATIVE": "off"}
    shown = subprocess.run([sys.executable, "-m", "sametoken.cli", "doctor"], capture_output=True, text=True, env=env)
    words = " ".join(shown.stdout.split())
    assert "none: SAMETOKEN_NATIVE=off leaves them out; torch computes alone, which is slower" in words
    assert "unset SAMETOKEN_NATIVE" in words
    code = "from sametoken import LLM; LLM('embedded'); LLM('embedded')"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert loaded.stderr.count("no compiled CPU kernels are loaded") == 1


def test_what_mends_it_is_said_when_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = KernelStatus(None, (), "none were built when this package was installed", "run: pip install X")
    monkeypatch.setattr("sametoken.engine.load.status", lambda: missing)
    note_missing_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        note_missing_kernels()
        note_missing_kernels()
    (record,) = caplog.records
    assert "(none were built when this package was installed)" in record.message
    assert record.message.endswith("run: pip install X")


def test_the_server_and_a_benchmark_record_say_the_same(pair: Pair) -> None:
    machine = describe_machine()
    with running(LLM(pair.target)) as server:
        assert server.get("/server_info").json()["machine"]["kernels"] == machine.kernels
    assert describe_environment("cpu", "float32", 1, 0.0).kernels == (machine.kernels or "none")
    assert describe_environment("http://127.0.0.1:1", None, None, 0.0).kernels is None


def test_windows_is_refused_by_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="Windows is not supported; run sametoken in WSL 2"):
        LLM("embedded")
    answer = run("generate", "--prompt", "a")
    assert (answer.code, answer.err) == (2, "error: Windows is not supported; run sametoken in WSL 2, the Windows "
                                            "Subsystem for Linux\n")  # fmt: skip
