"""Small tokenizers trained on a few sentences, with a chat template or without, and conversations for them."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from chat_templates import SIGNS
from sametoken.checkpoint.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog barks at the fox.",
    "def add(a, b):\n    return a + b  # the sum of 12 and 345\n",
    "Straße, naïve café: ünïcödé is the norm; 東京 is a city.",
] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]


def byte_fallback() -> Backend:
    """Llama-2 style: Prepend and Replace normalisers, byte fallback, BOS by the post-processor."""
    learner = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    state = json.loads(learner.to_str())["model"]
    learned = [token for token in sorted(state["vocab"], key=state["vocab"].get) if token not in SPECIAL]
    order = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *learned, SPECIAL[3]]
    vocab = {token: index for index, token in enumerate(order)}
    merges = [tuple(merge) for merge in state["merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def byte_level() -> Backend:
    """GPT-2 and Llama-3 style: byte-level BPE behind a split pattern, with an added token that is not special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"'\w+| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool>", normalized=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


BACKENDS = {"byte fallback": byte_fallback, "byte level": byte_level}


def speaker(template: str | None, kind: str = "byte level", ends: tuple[str, ...] = ("</s>",)) -> Tokenizer:
    backend = BACKENDS[kind]()
    backend.add_special_tokens([AddedToken(sign, rstrip=sign == "<|end|>") for sign in SIGNS])
    eos = [backend.token_to_id(token) for token in ends]
    templates = {} if template is None else {"default": template}
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": ends[0]}, templates, eos)


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(contents)
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, *({"role": role, "content": content} for role, content in zip(roles, contents, strict=False))]
