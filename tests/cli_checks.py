"""A tiny speaking pair of models and a way to call the command line; transformers is the oracle of what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel

from sametoken.cli import main
from tiny_models import build, save

SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = [chr(code) for code in range(32, 127)]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Pair(NamedTuple):
    """A tiny target and draft whose tokens are letters, and the target as transformers has it."""

    target: str
    draft: str
    oracle: PreTrainedModel


def speak(directory: Path) -> None:
    """Adds a tokenizer of single letters and a chat template to a checkpoint."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def make_pair(root: Path) -> Pair:
    for name, seed in (("target", 0), ("draft", 1)):
        save("llama-2", root / name, seed=seed)
        speak(root / name)
    return Pair(str(root / "target"), str(root / "draft"), build("llama-2", 0))


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Runs the command line in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return Answer(int(ended.value.code or 0), *capfd.readouterr())


def greedy(model: PreTrainedModel, text: str, count: int) -> list[int]:
    """What transformers continues a text with."""
    ids = torch.tensor([[len(SPECIAL) + LETTERS.index(letter) for letter in text]])
    out = model.generate(ids, do_sample=False, max_new_tokens=count, use_cache=False, pad_token_id=0)
    return [int(token) for token in out[0, ids.shape[1] :]]
