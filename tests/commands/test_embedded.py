"""The embedded pair: ordinary checkpoints that transformers reads alike, small enough to ship, speaking in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sametoken import LLM, SamplingParams, SpeculativeConfig
from sametoken.embedded import DRAFT, TARGET
from sametoken.errors import CheckpointError

TALK = [{"role": "user", "content": "Hi! A large latte with oat milk, please. Ça va? 你好 🙂"}]


def test_the_pair_is_small() -> None:
    size = sum(file.stat().st_size for directory in (TARGET, DRAFT) for file in directory.iterdir())
    assert size <= 30 * 10**6


@pytest.mark.parametrize("directory", [TARGET, DRAFT], ids=["target", "draft"])
def test_transformers_reads_the_same_model(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    llm = LLM(str(directory), dtype="float32", tokenizer=str(TARGET))
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert llm.render_chat(TALK) == ids
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=48, pad_token_id=0)[0, len(ids) :]
    got = llm.generate([ids], SamplingParams(temperature=0, max_tokens=48))[0]
    assert got.token_ids == expected.tolist()
    assert got.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_tokenizer_is_stored_once() -> None:
    assert [file.parent.name for file in sorted(TARGET.parent.rglob("tokenizer*"))] == ["target", "target"]


def test_copies_of_the_pair_draft_as_the_pair_does(tmp_path: Path) -> None:
    target, draft = (shutil.copytree(source, tmp_path / source.name) for source in (TARGET, DRAFT))
    params = SamplingParams(temperature=0, max_tokens=24)
    fixed = SpeculativeConfig(max_draft_len=4, adaptive=False)
    pairs = (("embedded", "embedded"), (str(target), str(draft)))
    own, copied = (LLM(*pair, speculative=fixed).chat(TALK, params)[0] for pair in pairs)
    assert copied.text == own.text
    assert copied.speculation.accepted == own.speculation.accepted > 0


def test_a_copied_draft_is_no_model_to_talk_to_without_a_tokenizer(tmp_path: Path) -> None:
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    with pytest.raises(CheckpointError, match=r"has no tokenizer, expected tokenizer\.json"):
        LLM(str(draft))


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
