"""What the README says is executed: its Python, commands and requests run, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sametoken import LLM
from server_checks import Running, running

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "embedded" / "README.md"]


SMALL = (  # what makes the training of a head short
    (r"--self-prompts \d+", "--self-prompts 6"),
    (r"--max-tokens \d+", "--max-tokens 12"),
    (r"--output-dir run", "--output-dir run --max-steps 2 --eval-tokens 8 --eval-prompts 2"),
)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str = README.partition("## Train a head")[0]) -> list[str]:
    """Lines that begin with the program's name and end; MODEL and DRAFT stand for the embedded pair."""
    lines = [line for block in blocks("sh", text) for line in block.splitlines() if line.startswith("sametoken ")]
    lines = [line for line in lines if not line.startswith("sametoken serve ")]  # see `served`
    return [line.replace("MODEL", "embedded").replace("DRAFT", "embedded") for line in lines]


def requests() -> list[str]:
    """Every curl of the documents that sends something to a server, with what stands on further lines."""
    texts = [block for document in DOCUMENTS for block in blocks("sh", document.read_text(encoding="utf-8"))]
    sent = r"^curl http://localhost:8000/\S+ -H '[^']*' -d '[^']*'"
    return [found for text in texts for found in re.findall(sent, text, re.M)]


def test_the_readme_has_examples() -> None:
    assert blocks("python")
    assert len(commands()) >= 3
    assert len(requests()) >= 4


@pytest.fixture(scope="module")
def served(one_thread: None) -> Iterator[Running]:
    with running(LLM("embedded", draft="embedded-eagle3")) as server:
        yield server


@pytest.mark.parametrize("request_", requests())
def test_requests_of_the_documents_are_answered(served: Running, request_: str) -> None:
    _, url, _, header, _, body = shlex.split(request_)
    as_curl = dict([header.split(": ")])
    content = json.dumps({"seed": 1} | json.loads(body))  # by chance an answer may be empty
    reply = served.client.post(url.replace("http://localhost:8000", served.url), content=content, headers=as_curl)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice.get("text") or choice["message"]["content"]
    if "report" in body:
        assert choice["speculative"].keys() == {"token_ids", "tokens", "origins", "rejected", "stats"}
        assert choice["speculative"]["stats"]["acceptance_length"] >= 1
    assert json.loads(body).get("speculative", {}).get("report", False) == ("speculative" in choice)


FROM_VLLM = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [*blocks("python"), *blocks("python", FROM_VLLM)])
def test_python_of_the_readme_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_run(command: str, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    line, _, target = command.partition(" > ")
    arguments = shlex.split(line, comments=True)[1:]
    if arguments[0] == "verify":  # the whole proof takes minutes; the test suite has its own
        arguments += ["--num-prompts", "2", "--max-tokens", "8", "--temperatures", "0.7"]
    if arguments[0] == "bench":
        arguments += ["--limit", "1", "--output-len", "8", "--repeat", "1"]
    done = run(*arguments)
    assert done.code == 0, done.err
    assert done.out.strip()
    if target:
        assert len(done.out.splitlines()) == 2


def test_a_head_is_trained_as_the_readme_says(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, curves: None
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = commands(README.partition("## Train a head")[2].partition("\n## ")[0])
    assert [shlex.split(step)[1] for step in steps] == [
        "synthesize", "synthesize", "train", "evaluate", "generate", "export",
    ]  # fmt: skip
    for step in steps:
        for pattern, replacement in SMALL:
            step = re.sub(pattern, replacement, step)
        done = run(*shlex.split(step)[1:])
        assert done.code == 0, done.err
    assert (tmp_path / "run" / "curves.png").exists()
    assert (tmp_path / "head-for-vllm" / "model.safetensors").exists()


def test_the_first_screen_has_make() -> None:
    first = README.splitlines()[:24]
    made = [line.split()[1] for line in first if line.startswith("make ")]
    assert {"demo", "test"} <= set(made)
    assert README.index("make test") < README.index("PYTORCH_CPU_INDEX")
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(made) <= set(known)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert "@@" not in document.read_text(encoding="utf-8"), "a figure is still missing"
    for link in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert link.startswith("http") or (document.parent / link).exists(), f"{document.name}: {link}"
