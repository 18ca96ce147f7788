"""docs/from-the-documents.md: it has every command of the five documents, and ours beside them run in its order."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import TrainingArguments

from sametoken import embedded

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-the-documents.md").read_text(encoding="utf-8")
PLAYBOOKS = ROOT / "tests" / "playbooks"
# The programs and files that the documents' commands name, one document a line.
NAMED = """
docker run|trtllm-serve|hf download|huggingface-cli login|extra-llm-api-config.yml|docker stop|curl -X POST
HF_TOKEN|/tmp/extra-llm-api-config.yml|TIKTOKEN_ENCODINGS_BASE|nvidia/gpt-oss-120b-Eagle3-long-context
mpirun|trtllm-llmapi-launch|/etc/openmpi-hostfile|trtllm-mn-entrypoint.sh|enp1s0f1np1|nvidia/Qwen3-235B-A22B-FP4
vllm serve|--quantization=modelopt|server_generate.py|salloc|distributed_generate/sharding_utils.py|--combine|distributed_generate/launch.sh|./launch.sh|mtsp.convert|mto.enable_huggingface_checkpointing()|nvidia-modelopt[hf]
docker compose -f deploy/docker-compose.yml up -d|./container/build.sh|./container/run.sh|agg_spec_decoding.sh|curl http
"""  # noqa: E501
DRAFTS = {
    "nvidia/gpt-oss-120b-Eagle3-long-context": embedded.HEAD_NAME,
    "/opt/Llama-3.1-8B-Instruct-FP4/": embedded.NAME,
    "/opt/gpt-oss-120b-Eagle3/": embedded.HEAD_NAME,
}
TARGETS = (
    "nvidia/Llama-3.3-70B-Instruct-FP4", "openai/gpt-oss-120b", "nvidia/Qwen3-235B-A22B-FP4",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "<path to your pretrained model>",
)  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands(*beginning: str) -> list[str]:
    """Our commands that begin with these words."""
    start = " ".join(("sametoken", *beginning))
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith(start)]


def here(text: str, place: Path) -> str:
    """The same for the embedded models and a folder of the test."""
    for name, ours in DRAFTS.items():
        text = text.replace(name, ours)
    for name in TARGETS:
        text = text.replace(name, embedded.NAME)
    text = re.sub(r"(?<=[ =])/(data|tmp)/", rf"{place}/\1/", text)
    return text.replace("$SLURM_JOB_ID", "12")


def words(line: str, place: Path) -> list[str]:
    return shlex.split(here(line, place))[1:]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the documents' files in it."""
    found = tmp_path_factory.mktemp("documents")
    rows = [{"role": "user", "content": text} for text in ("Hello!", "Can you book a table?", "Thanks, bye.")]
    lines = "".join(
        json.dumps({"conversation_id": str(number), "conversations": [row, {"role": "assistant", "content": "Yes."}]})
        + "\n"
        for number, row in enumerate(rows)
    )
    for name in ("Daring-Anteater", "data", "tmp"):
        (found / name).mkdir()
    for name in ("Daring-Anteater/train.jsonl", "data/train.jsonl"):
        (found / name).write_text(lines)
    (found / "extra-llm-api-config.yml").write_text(here((PLAYBOOKS / "draft_target.yml").read_text(), found))
    (found / "tmp" / "extra-llm-api-config.yml").write_text(here((PLAYBOOKS / "eagle.yml").read_text(), found))
    return found


@contextmanager
def served(line: str, place: Path) -> Iterator[str]:
    """The address of a server that a line of the page starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = words(re.sub(r" --port \d+", "", line), place)
    command = [sys.executable, "-m", "sametoken.cli", *told, "--port", str(port)]
    with subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    assert process.poll() is None, process.communicate()[1]
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate(timeout=30)


def test_the_page_names_every_command_of_the_documents() -> None:
    flat = re.sub(r"\s+", " ", PAGE)
    assert [name for name in re.split(r"[|\n]", NAMED.strip()) if name not in flat] == []
    assert blocks("yaml") == [(PLAYBOOKS / "draft_target.yml").read_text()]


def test_every_command_of_the_page_is_run_below() -> None:
    run_below = (
        "serve",
        "vllm serve",
        "synthesize",
        "shard",
        "train",
        "deploy two-node",
        "deploy slurm",
        "deploy plan",
    )
    covered = [line for each in run_below for line in commands(*each.split())]
    assert sorted(covered) == sorted(commands())
    assert len(covered) == 15


@pytest.mark.parametrize("line", commands("serve"))
def test_servers_answer_the_documents_requests(line: str, place: Path) -> None:
    requests = [shlex.split(block) for block in blocks("sh") if block.startswith("curl")]
    assert len(requests) == 2
    with served(line, place) as url:
        for request in requests:
            path = next(word for word in request if word.startswith("http")).removeprefix("http://localhost:8000")
            body = json.loads(request[-1]) | {"model": embedded.NAME}
            reply = httpx.post(url + path, json=body, timeout=60)
            assert reply.status_code == 200, reply.text
            (choice,) = reply.json()["choices"]
            assert choice.get("text") or choice["message"]["content"]
        body = {"prompt": "Hello", "max_tokens": 16, "temperature": 0, "speculative": {"report": True}}
        (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert choice["speculative"]["stats"]["method"] == ("draft_target" if "Llama" in line else "eagle3")


def test_data_and_training(place: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    asked, alone = commands("synthesize")
    (server,) = commands("vllm", "serve")
    with served(server, place) as url:
        done = run(*words(asked.replace("http://localhost:8000", url), place))
        assert httpx.get(f"{url}/v1/models").status_code == 401, "the document's key is asked for"
    assert done.code == 0, done.err
    done = run(*words(alone, place))
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (place / "finetune" / "brief.jsonl").read_text().splitlines()]
    assert {row["conversations"][0]["content"] for row in rows} == {"Answer in one sentence."}
    for line in commands("train"):
        mode = "medusa" if "medusa" in line else "eagle"
        done = run(*words(line, place), "--max-steps", "1", "--training-seq-len", "64")
        assert done.code == 0, done.err
        assert ("mode eagle means eagle3" in done.err) == (mode == "eagle")
        assert list((place / f"{mode}-tinyllama" / "head").glob("*.safetensors"))


def test_shards_on_slurm(place: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    cut, together = commands("shard")
    assert run(*words(cut, place)).code == 0
    assert [file.name for file in (place / "data" / "train").iterdir()] == ["train-00000-00000.jsonl"]
    first, second = commands("deploy", "slurm")
    done = run(*words(first, place), "--dry-run")
    assert done.code == 0, done.err
    assert {"first=0", "shards"} <= set(re.findall(r"first=\d+|shards", done.out))
    assert "--system-prompt 'You are a helpful assistant.'" in done.out
    (place / "data" / "train" / "train-00000-00000.jsonl").rename(place / "data" / "train" / "train-00040-00040.jsonl")
    assert "first=40" in run(*words(second, place), "--dry-run").out
    (place / "data" / "output").mkdir()
    rows = (place / "data" / "train.jsonl").read_text()
    (place / "data" / "output" / "output-00000-00000.jsonl").write_text(rows + '{"finished": true}\n')
    assert run(*words(together, place)).code == 0
    assert len((place / "data" / "output.jsonl").read_text().splitlines()) == 3


def test_two_hosts(place: Path, run: Any) -> None:
    """The words are taken: the first thing that is wrong is that this machine is none of the two."""
    (line,) = commands("deploy", "two-node")
    done = run(*words(line, place), "--dry-run")
    assert done.code == 2
    assert "192.168.200.12 is no address of this machine" in done.err


@pytest.mark.parametrize(("line", "worker"), [*zip(commands("deploy", "plan"), ("vllm", "sametoken"), strict=True)])
def test_scripts_of_dynamo(line: str, worker: str, place: Path, run: Any) -> None:
    told, _, file = line.partition(" > ")
    done = run(*words(told, place))
    assert done.code == 0, done.err
    assert file == "agg_spec_decoding.sh"
    assert subprocess.run(["bash", "-n"], input=done.out, text=True, check=False).returncode == 0
    assert {"vllm": "python -m dynamo.vllm", "sametoken": "python -m sametoken.deploy.dynamo"}[worker] in done.out


@pytest.mark.parametrize("mode", ["medusa", "eagle"])
def test_the_documents_script_trains(mode: str, tmp_path: Path) -> None:
    (code,) = blocks("python")
    code = code.replace("<path to your pretrained model>", str(embedded.TARGET))
    code = code.replace("<path to the output directory>", str(tmp_path / "out"))
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=1, use_cpu=True, report_to=[], per_device_train_batch_size=1
    )
    rows = [{"input_ids": list(range(20, 52)), "labels": list(range(20, 52))}]
    given = {"mode": mode, "training_args": arguments, "data_module": {"train_dataset": rows}, "checkpoint": None}
    with pytest.warns(UserWarning, match="means eagle3") if mode == "eagle" else nullcontext():
        exec(compile(code, "from-the-documents.md", "exec"), given)
    assert list((tmp_path / "out" / "head").glob("*.safetensors"))
