"""The GPU check's programs run here too, on a tiny model: their arithmetic is tried, their figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*command: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_measurement_runs(tmp_path: Path) -> None:
    program = str(ROOT / "benchmarks" / "gpu.py")
    options = ["--device", "cpu", "--shape", "tiny", "--tokens", "24", "--rounds", "1", "--out", str(tmp_path)]
    done = run(sys.executable, program, *options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in done.stdout.splitlines()] == lines
    equality = next(line for line in lines if "equal" in line)
    assert equality["equal"]
    assert set(equality["first difference at"].values()) == {None}
    rows = [line for line in lines if "acceptance length" in line]
    assert all(row.get("same text", True) for row in rows)
    lengths = {row["what"]: row["acceptance length"] for row in rows if row["steps"] == "captured"}
    assert lengths["plain"] == 1
    assert 1 < lengths["draft, 0.6 a token"] < lengths["draft, 0.9 a token"] <= 5
    batches = [line for line in lines if line.get("what") == "batch of 4"]
    assert all(line["none: rows alike"] == line["replay: rows alike"] == 4 for line in batches)
    assert len(batches) == 2
    assert "transformers tokens/s" in lines[-1]


def test_the_script_names_what_is_missing(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    done = run("bash", str(ROOT / "scripts" / "gpu_check.sh"), python=str(bare))
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "pydantic" in done.stderr
    assert "WHEELS" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the script runs in full; here it must refuse")
def test_the_script_needs_a_gpu_unless_told_otherwise() -> None:
    done = run("bash", str(ROOT / "scripts" / "gpu_check.sh"))
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
