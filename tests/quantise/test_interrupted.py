"""`sametoken quantize` that a signal ends, and what killed runs left: nothing stays behind, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cli_checks import speak
from sametoken.errors import DataError
from sametoken.files import UNFINISHED, holding, new_directory

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 60,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    speak(tmp_path / "model")
    begun = [sys.executable, "-m", "sametoken.cli", "quantize", str(tmp_path / "model"), "--format", "int4"]
    with subprocess.Popen(
        [*begun, "--group-size", "32", "--threads", "1", "--output", str(tmp_path / "out")],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # ignored where tests run under nohup
    ) as process:
        end = time.monotonic() + 60
        while not list(tmp_path.glob(f".out-*{UNFINISHED}")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == 130
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


def left_behind(place: Path, name: str) -> Path:
    place.mkdir()
    (place / name).mkdir()
    (place / name / "file").write_text(name)
    os.utime(place, (0, 0))
    return place


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    stale = left_behind(tmp_path / f".out-abcdefgh{UNFINISHED}", "new")
    busy = left_behind(tmp_path / f".out-ijklmnop{UNFINISHED}", "new")
    others = left_behind(tmp_path / f".other-abcdefgh{UNFINISHED}", "new")
    backup = left_behind(tmp_path / ".out-backup", "new")
    with holding(busy), new_directory(tmp_path / "out"):
        assert not stale.exists()
    assert {place.name for place in tmp_path.iterdir()} == {"out", busy.name, others.name, backup.name}


def test_what_a_killed_run_was_about_to_replace_is_put_back(tmp_path: Path) -> None:
    left_behind(tmp_path / f".out-abcdefgh{UNFINISHED}", "old")
    with pytest.raises(DataError, match="full"), new_directory(tmp_path / "out", replace=True):
        raise OSError(28, "full")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [place.name for place in tmp_path.iterdir()] == ["out"]
