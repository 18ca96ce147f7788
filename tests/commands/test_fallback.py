"""Commands without MODEL: the first line names the embedded model, and data of the user's own is never given to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SAID = "no MODEL given: using 'embedded', the small model that comes with the package"
DATA = ("generate", "verify", "prepare", "train", "quantize", "bench")


@pytest.fixture
def conversations(tmp_path: Path) -> str:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi!"}]}) + "\n")
    return str(file)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--prompt", "Hi!", "--max-tokens", "2"),
        ("bench", "--api-key", "key"),
        ("verify", "--num-prompts", "1", "--max-tokens", "4", "--temperatures", "0", "--method", "ngram"),
        ("synthesize", "--self-prompts", "1"),
        ("chat", "--temperature", "-1"),
        ("train", "--mode", "no-such-mode"),
        ("prepare",),
        ("quantize",),
        ("deploy", "plan"),
        ("serve", "--port", "70000"),
    ],
)
def test_the_first_line_names_the_embedded_model(run: Any, words: tuple[str, ...]) -> None:
    said = run(*words)
    assert said.err.splitlines()[0] == SAID
    length = 2 if words[0] == "deploy" else 1
    named = run(*words[:length], "embedded", *words[length:])
    assert SAID not in named.err
    assert named.code == said.code


def test_a_document_s_own_line_asks_for_the_model(run: Any, conversations: str, tmp_path: Path) -> None:
    """What `server_generate.py` is called with, without its server."""
    out = tmp_path / "finetune" / "data.jsonl"
    said = run("synthesize", "--data_path", conversations, "--output_path", str(out), "--max_token", "512", "--chat")
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "error: got data and no MODEL; expected sametoken synthesize MODEL; 'embedded' is the small model that comes "
        "with the package\n"
    )
    assert not out.parent.exists()


@pytest.mark.parametrize("command", [*DATA, "deploy slurm train", "deploy slurm synthesize"])
def test_no_command_gives_users_data_to_the_embedded_model(run: Any, command: str, conversations: str) -> None:
    said = run(*command.split(), "--data", conversations)
    assert said.code == 2
    assert f"error: got data and no MODEL; expected sametoken {command} MODEL; " in said.err


def test_a_head_is_not_measured_on_the_embedded_target_unasked(run: Any, conversations: str) -> None:
    said = run("evaluate", "no/such/head")
    assert said.err.splitlines()[0] == SAID.replace("MODEL", "--target MODEL")
    said = run("evaluate", "no/such/head", "--data", conversations)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "got data and no --target MODEL; expected --target MODEL beside the head" in said.err
    assert "no --target" not in run("evaluate", "embedded", "--max-tokens", "0").err


@pytest.mark.parametrize("command", ["synthesize", "chat", "bench"])
def test_a_server_knows_its_model(run: Any, command: str, conversations: str) -> None:
    words = ("--data", conversations, "--output", f"{conversations}.out") if command == "synthesize" else ()
    said = run(command, "--url", "http://127.0.0.1:9", *words, *(("--retries", "0") if words else ()))
    assert "no MODEL" not in said.err
