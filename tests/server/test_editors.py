"""Editors' plug-ins for llama-server work as they are: the requests that llama.vim and llama.vscode send to /infill.

Fields and values are those of their sources of 2025 (autoload/llama.vim, src/llama-server.ts).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.server.llama import infill
from server_checks import Running, running, with_template

BEFORE = "#include <stdio.h>\n\nint add(int a, int b) {\n"
AFTER = "\n}\n\nint main(void) {\n    return add(1, 2);\n}\n"
CHUNKS = [{"text": "int sub(int a, int b);\n", "time": 1732, "filename": "sub.h"}]

# What llama.vim sends when a key is pressed, through curl.
VIM: dict[str, Any] = {
    "input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": CHUNKS, "prompt": "    return a", "n_predict": 128,
    "n_indent": 4, "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 500,
    "response_fields": [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms",
        "timings/predicted_per_second", "truncated", "tokens_cached",
    ],
}  # fmt: skip
# What it sends to have other files read in advance.
RING: dict[str, Any] = {
    "input_prefix": "", "input_suffix": "", "input_extra": CHUNKS, "prompt": "", "n_predict": 0, "temperature": 0.0,
    "stream": False, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
    "response_fields": [""],
}  # fmt: skip
# What llama.vscode sends, through axios: for a gap, and to edit a selected text.
VSCODE: dict[str, Any] = {
    "input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": CHUNKS, "prompt": "    return a", "n_predict": 128,
    "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
    "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 2500, "lora": [{"id": 0, "scale": 0.5}],
}  # fmt: skip
EDIT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "You are"}, {"role": "user", "content": "x"}], "stream": False,
    "cache_prompt": True, "samplers": "edkypmxt", "temperature": 0.8, "dynatemp_range": 0, "dynatemp_exponent": 1,
    "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 0.1,
    "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "max_tokens": -1, "timings_per_token": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:  # any tokens of the little vocabulary do for marks
        directory = tmp_path_factory.mktemp("target")
        llm = LLM(with_template(tiny_pair.target, directory, "{% for m in messages %}{{ m.content }}{% endfor %}"))
        names = [llm.tokenizer.token_text(token) for token in range(20, 24)]
        for kind, name in zip(("PREFIX", "SUFFIX", "MIDDLE", "FILE"), names, strict=True):
            patch.setattr(infill, kind, (name,))
        with running(llm, any_model=True) as server:
            yield server


@pytest.mark.parametrize("asked", [VIM, VSCODE], ids=["llama.vim", "llama.vscode"])
def test_a_gap_is_filled(served: Running, asked: dict[str, Any]) -> None:
    short = {**asked, "input_prefix": "a\n", "input_suffix": "b\n", "input_extra": [], "prompt": "c", "n_predict": 8}
    answer = served.post("/infill", short)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert isinstance(body["content"], str)
    if "response_fields" in asked:
        assert body.keys() == set(asked["response_fields"])
    else:
        assert body["timings"]["predicted_n"] <= 8
        assert body["tokens_cached"] > 0


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}], ids=["whole", "streamed", "twice"])
def test_the_suffix_of_completions_is_the_same_gap(served: Running, more: dict[str, Any]) -> None:
    gap = {"input_prefix": "a\n", "input_suffix": "b\n", "n_predict": 8, "temperature": 0, "top_k": 0, "top_p": 1}
    expected = served.post("/infill", gap).json()["content"]
    asked = {"prompt": "a\n", "suffix": "b\n", "max_tokens": 8, "temperature": 0, **more}
    answer = served.post("/v1/completions", asked)
    assert answer.status_code == 200, answer.text
    if "stream" in more:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        found = ["".join(json.loads(line)["choices"][0]["text"] for line in lines)]
    else:
        found = [choice["text"] for choice in answer.json()["choices"]]
    assert found == [expected] * more.get("n", 1)
    without = served.post("/v1/completions", {**asked, "suffix": None, "stream": False}).json()["choices"][0]["text"]
    assert without != expected, "the suffix is read"


def test_other_files_are_read_in_advance(served: Running) -> None:
    answer = served.post("/infill", {**RING, "input_extra": [{"text": "x", "time": 1, "filename": "y"}]})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {}


def test_a_selected_text_is_edited(served: Running) -> None:
    answer = served.post("/v1/chat/completions", EDIT)
    assert answer.status_code == 200, answer.text
    assert isinstance(answer.json()["choices"][0]["message"]["content"], str)
