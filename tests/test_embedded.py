"""The embedded pair: ordinary checkpoints that transformers reads alike, small enough to ship, speaking in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sametoken import LLM, SamplingParams
from sametoken.embedded import DRAFT, TARGET

TALK = [{"role": "user", "content": "Hi! A large latte with oat milk, please. Ça va? 你好 🙂"}]


def test_the_pair_is_small() -> None:
    size = sum(file.stat().st_size for directory in (TARGET, DRAFT) for file in directory.iterdir())
    assert size <= 30 * 10**6


@pytest.mark.parametrize("directory", [TARGET, DRAFT], ids=["target", "draft"])
def test_transformers_reads_the_same_model(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    llm = LLM(str(directory), dtype="float32")
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert llm.render_chat(TALK) == ids
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=48, pad_token_id=0)[0, len(ids) :]
    got = llm.generate([ids], SamplingParams(temperature=0, max_tokens=48))[0]
    assert got.token_ids == expected.tolist()
    assert got.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_configurations_state_what_the_files_hold() -> None:
    for directory in (TARGET, DRAFT):
        config = json.loads((directory / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["dtype"] == "bfloat16"
        assert config["head_dim"] == 64


def test_log_probabilities_in_bfloat16_belong_to_the_tokens() -> None:
    """bfloat16 cannot count beyond 256, so ids must never pass through it."""
    llm = LLM("embedded", draft="embedded")
    done = llm.chat(TALK, SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=0))[0]
    assert done.logprobs is not None
    assert any(item.token_id > 256 for item in done.logprobs)
    for item, token in zip(done.logprobs, done.token_ids, strict=True):
        assert (item.token_id, item.logprob) == item.top[0]
        assert (item.token_id, item.rank) == (token, 1)
    assert done.prompt_logprobs is not None
    scored = [item.token_id for item in done.prompt_logprobs[1:] if item is not None]
    assert scored == done.prompt_token_ids[1:]
