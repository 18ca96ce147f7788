"""lm-eval scores and generates through /v1/completions: its sums and texts are those of transformers.

It sends token ids, as it does unless told otherwise: the tokens of a text it would count without the beginning's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from clients_checks import HERE, PYTHON, Served, said

TASKS = HERE / "tasks"
TOKENS = 24  # max_gen_toks of answers.yaml


class Oracle(NamedTuple):
    """The target in transformers, in float32."""

    model: Any
    tokenizer: Any

    def score(self, begin: str, end: str) -> tuple[float, bool]:
        """The log-probability of `end` after `begin`, and whether greedy decoding would say it."""
        read, told = (self.tokenizer.encode(text) for text in (begin, begin + end))
        with torch.inference_mode():
            scores = self.model(torch.tensor([told])).logits[0, len(read) - 1 : -1].log_softmax(-1)
        expected = torch.tensor(told[len(read) :])
        return scores.gather(-1, expected[:, None]).sum().item(), bool((scores.argmax(-1) == expected).all())

    def answer(self, begin: str, until: list[str]) -> str:
        """What greedy decoding says before the first of the marks."""
        read = torch.tensor([self.tokenizer.encode(begin)])
        told = self.model.generate(read, attention_mask=torch.ones_like(read), do_sample=False, max_new_tokens=TOKENS)
        before, after = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (read[0], told[0]))
        text = after[len(before) :]
        return text[: min(at if (at := text.find(mark)) >= 0 else len(text) for mark in until)]


@pytest.fixture(scope="module")
def oracle(served: Served) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(served.directory, dtype=torch.float32)
    return Oracle(model, AutoTokenizer.from_pretrained(served.directory))


@pytest.fixture(scope="module")
def samples(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lm-eval asked and heard, by task."""
    out = tmp_path_factory.mktemp("lm_eval")
    model = {
        "model": served.model,
        "base_url": f"{served.url}/v1/completions",
        "num_concurrent": 3,
        "max_retries": 1,
        "tokenizer": served.directory,
        "add_bos_token": True,
    }
    said(
        PYTHON / "lm_eval", "run", "--model", "local-completions", "--model_args",
        ",".join(f"{key}={value}" for key, value in model.items()), "--include_path", TASKS,
        "--tasks", "sametoken_ends,sametoken_answers", "--log_samples", "--output_path", out,
        cwd=TASKS, HF_HUB_OFFLINE="1", HF_HOME=str(out),
    )  # fmt: skip
    return {name: read_lines(out, f"samples_sametoken_{name}_*.jsonl") for name in ("ends", "answers")}


def read_lines(directory: Path, pattern: str) -> list[Any]:
    (file,) = directory.rglob(pattern)
    return [json.loads(line) for line in file.read_text().splitlines()]


def asked(sample: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The arguments of a sample's requests."""
    return [tuple(arguments.values()) for arguments in sample["arguments"].values()]


def test_each_choice_has_transformers_sum(samples: dict[str, Any], oracle: Oracle) -> None:
    expected = [oracle.score(*arguments) for sample in samples["ends"] for arguments in asked(sample)]
    got = [(float(total), greedy == "True") for sample in samples["ends"] for ((total, greedy),) in sample["resps"]]
    assert len(got) == 7
    assert [total for total, _ in got] == pytest.approx([total for total, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in got} == {True, False}


def test_each_answer_is_transformers_up_to_the_stop(samples: dict[str, Any], oracle: Oracle) -> None:
    for sample in samples["answers"]:
        ((begin, settings),) = asked(sample)
        assert sample["resps"] == [[oracle.answer(begin, settings["until"])]]
    assert len(samples["answers"]) == 3
