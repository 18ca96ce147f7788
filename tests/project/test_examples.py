"""The examples and the notebook run as they are, and say what they promise."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from sametoken import LLM
from server_checks import running

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Runs an example as `python examples/NAME ARGUMENTS` does."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_offline_batch(one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "offline_batch.py")
    assert capsys.readouterr().out.count("for each forward of the target") == 4


def test_server_client(one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(LLM("embedded", draft="embedded-eagle3")) as server:
        run(monkeypatch, "server_client.py", server.url)
    written = capsys.readouterr().out
    assert "without drafts: 1.00 tokens" in written
    assert "The answers differ" not in written


def test_the_notebook(one_thread: None, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            assert cell["outputs"] == [], "clear the notebook's outputs before you commit it"
    assert "equal: " in capsys.readouterr().out


@pytest.mark.thorough
def test_head_for_your_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "head_for_your_model.py", "--conversations", "6", "--steps", "2")
    assert (tmp_path / "head-for-your-model" / "run" / "head").is_dir()
    assert capfd.readouterr().out.count("$ sametoken") == 5
