"""vLLM's CPU build, started by `sametoken serve --engine vllm`: at temperature 0 it says what we say.

Runs by `make test-engines`, which installs vLLM; SAMETOKEN_ENGINES is the folder of that environment.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from sametoken import LLM, SamplingParams, embedded
from sametoken.prompts.sources import BUILT_IN, as_turn
from sametoken.train.dataset.prepared import Prepared

PLACE = os.environ.get("SAMETOKEN_ENGINES", "")
pytestmark = [
    pytest.mark.skipif(not PLACE, reason="needs vLLM: make test-engines"),
    pytest.mark.timeout(1500),
]
PYTHON = Path(PLACE) / "bin" / "python"
PROMPTS, TOKENS, DRAFT_LEN = 12, 64, 4
TIE = 0.125  # nats: one step of bfloat16 at the size of these logits; a smaller margin may turn either way
OWN = {
    **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


class Answer(NamedTuple):
    """Token ids, and how far the best token was before the second at each of them, in nats."""

    tokens: list[int]
    margins: list[float]


@pytest.fixture(scope="module")
def ours() -> tuple[list[list[int]], list[Answer]]:
    """Prompts as ids, and what our engine answers without a draft."""
    llm = LLM("embedded", dtype="bfloat16", max_batch_size=1)
    turns = [as_turn(turn).messages for turn in BUILT_IN[:PROMPTS]]
    prompts = [
        llm.tokenizer.encode(llm.tokenizer.apply_chat_template(turn), add_special_tokens=False) for turn in turns
    ]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    answers = []
    for done in llm.generate(prompts, params):
        assert done.logprobs is not None
        best = [[logprob for _, logprob in place.top] for place in done.logprobs]
        answers.append(Answer(list(done.token_ids), [first - second for first, second, *_ in best]))
    return prompts, answers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def served(words: list[str], tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The server's URL while `sametoken serve --engine vllm` runs."""
    port = free_port()
    command = [
        sys.executable, "-m", "sametoken.cli", "serve", "embedded", "--engine", "vllm", "--engine-python", str(PYTHON),
        "--port", str(port), "--dtype", "bfloat16", "--max-seq-len", "512", "--max-batch-size", "4",
        "--enforce-eager", "--engine-timeout", "900", "--max-draft-len", str(DRAFT_LEN), *words,
    ]  # fmt: skip
    print("+", shlex.join(command))
    environment = {**OWN, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        while not said.endswith("answers\n"):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def metric(text: str, name: str) -> float:
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:spec_decode_{name}_total{{")
    )


@pytest.mark.parametrize("draft", ["embedded", "embedded-eagle3"])
def test_vllm_says_what_we_say(draft: str, ours: tuple[list[list[int]], list[Answer]], tmp_path: Path) -> None:
    out = [] if draft == "embedded" else ["--out", str(tmp_path / "head")]
    prompts, answers = ours
    with served(["--draft", draft, *out], tmp_path) as (url, process):
        same = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            body: dict[str, Any] = {
                "model": "embedded", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
            assert reply.status_code == 200, reply.text
            theirs = reply.json()["choices"][0]["token_ids"]
            assert len(theirs) == TOKENS
            apart = [n for n, (a, b) in enumerate(zip(answer.tokens, theirs, strict=True)) if a != b]
            same += not apart
            assert not apart or answer.margins[apart[0]] <= TIE, f"{prompt[:8]}: token {apart[0]}"
        metrics = httpx.get(f"{url}/metrics", timeout=30).text
        drafts, accepted = metric(metrics, "num_drafts"), metric(metrics, "num_accepted_tokens")
        print(f"{draft}: {same} of {len(prompts)} texts equal; acceptance length {1 + accepted / drafts:.2f}")
        assert metric(metrics, "num_draft_tokens") == DRAFT_LEN * drafts
        assert accepted > drafts
        measured = subprocess.run(
            [sys.executable, "-m", "sametoken.cli", "bench", "--url", url, "--limit", "2", "--output-len", "16",
             "--repeat", "1", "--out", str(tmp_path / "bench")],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert measured.returncode == 0, measured.stderr
        print(measured.stdout)
    assert process.returncode == 0
    end = time.monotonic() + 30
    while time.monotonic() < end:  # its engine process ends with it
        try:
            httpx.get(f"{url}/health", timeout=1)
        except httpx.TransportError:
            return
    pytest.fail(f"{url} still answers")


def test_hidden_states_are_those_of_this_process(tmp_path: Path) -> None:
    """As docs/data-generation.md starts vLLM, but for the connector, which is for a CPU here."""
    port, extra = free_port(), {"shared_storage_path": str(tmp_path / "states")}
    config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 8, 13, 16]}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": config}
    connector = {
        "kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_hidden_states",
        "kv_role": "kv_producer", "kv_connector_extra_config": extra,
    }  # fmt: skip
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(embedded.TARGET), "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager",
        "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector),
    ]  # fmt: skip
    environment = {**OWN, "PYTHONPATH": str(Path(__file__).parent)}
    said = [{"role": "user", "content": "Tell me about rivers."}, {"role": "assistant", "content": "They flow. " * 9}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"conversations": said}) for _ in range(3)))
    prepare = [
        sys.executable, "-m", "sametoken.cli", "prepare", "embedded", "--data", str(data), "--hidden-states", "--dtype",
        "bfloat16", "--output",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment)
    try:
        until(lambda: answers(port), 900)
        wrong = [*prepare, str(tmp_path / "wrong"), "--url", f"http://127.0.0.1:{port}", "--taps", "1,2"]
        refused = subprocess.run(wrong, capture_output=True, text=True, check=False)
        assert (refused.returncode, "eagle_aux_hidden_state_layer_ids [2, 3, 16]" in refused.stderr) == (2, True)
        subprocess.run([*prepare, str(tmp_path / "served"), "--url", f"http://127.0.0.1:{port}"], check=True)
    finally:
        process.terminate()
        process.wait(120)
    subprocess.run([*prepare, str(tmp_path / "here")], check=True)
    served_states, here = (Prepared.open(tmp_path / name) for name in ("served", "here"))
    for sample in range(len(here)):
        found, expected = served_states.features(sample), here.features(sample)
        assert found is not None
        assert expected is not None
        for part, own in zip(found, expected, strict=True):
            assert (part.float() - own.float()).norm() < 0.03 * own.float().norm()  # roundings of bfloat16


def answers(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200
    return False


def until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.5)
