"""Small engines to try, prompts to feed them, and what must hold of any engine after any run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import tiny_models
from adversaries import Adversary
from cli_checks import speak
from sametoken import LLM, Completion, SamplingParams
from sametoken.drafters.device import proposers
from sametoken.engine.captured import CapturedSteps
from sametoken.engine.engine import Engine
from sametoken.engine.plan import Plan
from sametoken.options.sampling import RequestSpeculation
from sametoken.options.speculation import NO_DRAFT
from sametoken.runtime.graphs import GraphKey

PLAIN = RequestSpeculation(enabled=False)
PAGE = 8
DEPTH = 4  # longest draft of the engines here


def sharpen(model: PreTrainedModel, factor: float = 3.0) -> PreTrainedModel:
    """Makes a random model sure of itself, so that a draft is right more often than by chance."""
    with torch.no_grad():
        decoder = model.get_decoder()
        getattr(decoder, "model", decoder).norm.weight.mul_(factor)  # Llama 4 gives the whole model
    return model


def disturb(model: PreTrainedModel, amount: float, seed: int = 5) -> PreTrainedModel:
    """Moves every weight a little: a draft that is often right, not always."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * amount)
    return model


def save_pair(family: str, root: Path, amount: float = 0.05) -> tuple[str, str]:
    """Directories of a sharp target and of a draft that resembles it."""
    for name, model in (
        ("target", sharpen(tiny_models.build(family))),
        ("draft", disturb(sharpen(tiny_models.build(family)), amount)),
    ):
        model.save_pretrained(root / name)
        speak(root / name)
    return str(root / "target"), str(root / "draft")


def llama(root: Path, **options: Any) -> str:
    """The directory of a sharp random Llama of a given shape."""
    config = LlamaConfig(**{**tiny_models.COMMON, "initializer_range": 0.08, **options})
    torch.manual_seed(0)
    model = sharpen(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.save_pretrained(root)
    speak(root)
    return str(root)


BYTE = 3  # the id of byte 0 in the tokenizer of `speak_bytes`; words follow the 256 bytes
WORDS = ("▁", "▁the", "▁cat", "cat", "s", "END", "▁E", "N", "D", "é", "▁日本")
BYTE_VOCAB = BYTE + 256 + len(WORDS)


def byte_tokenizer() -> Tokenizer:
    """Llama-2 style: words, a byte for everything else, and a decoder that strips one leading space."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: index for index, token in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(names[:3])
    return backend


def speak_bytes(directory: Path) -> None:
    """Gives a checkpoint of BYTE_VOCAB tokens the tokenizer of bytes."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_llm(target: str, draft: str | None = None, *, cache: dict[str, Any] | None = None, **options: Any) -> LLM:
    """A float32 engine of eight rows with small pages; options of speculation and of the engine are told apart.

    Its steps are the host's own, whatever the device: `test_captured` and `test_cuda` ask for the others.
    """
    unasked = None if draft else "none"
    known = {"max_draft_len": DEPTH, "tree_top_k": 1, "method": unasked, "max_total_draft_tokens": None}
    known |= {"adaptive": False, "draft_tensor_parallel_size": 1, "draft_window": 512, "draft_len_schedule": None}
    known |= {"draft_vocab_size": None, "draft_token_map": None}
    speculative = {key: options.pop(key, value) for key, value in known.items()}
    settings = {
        "dtype": "float32", "device": tiny_models.DEVICE, "deterministic": True, "cuda_graphs": False,
        "max_batch_size": 8, "max_seq_len": 96, **options,
    }  # fmt: skip
    pages = {"tokens_per_block": PAGE, "max_tokens": 1024, **(cache or {})}
    return LLM(target, draft, speculative, kv_cache=pages, **settings)


def prompts(count: int, vocab_size: int = 90, seed: int = 3, longest: int = 40) -> list[list[int]]:
    """Random prompts of different lengths, from one token on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 13, longest, 2, PAGE * 2, PAGE + 1, 22, 31][:count]
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def alone(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Completion:
    """The oracle: plain decoding of one request by itself."""
    return llm.generate(list(prompt), replace(params, speculative=PLAIN))[0]


def using(params: SamplingParams, method: str) -> SamplingParams:
    return replace(params, speculative=RequestSpeculation(method=method))


def said(completion: Completion) -> tuple[Any, ...]:
    """All of a completion that speculation must not change."""
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        completion.logprobs,
        completion.prompt_logprobs,
    )


def inject(llm: LLM, drafters: dict[str, Adversary]) -> None:
    llm.engine.drafters.update(drafters)


def watch(llm: LLM) -> list[Plan]:
    """The plans of all further steps."""
    plans: list[Plan] = []
    plan = llm.engine.scheduler.plan

    def spy() -> Plan:
        plans.append(plan())
        return plans[-1]

    llm.engine.scheduler.plan = spy  # type: ignore[method-assign]
    return plans


def check_idle(engine: Engine) -> None:
    """Nothing runs: every page is free or kept for its prefix, every row and every drafter's memory is empty."""
    blocks = engine.scheduler.blocks
    blocks.check()
    assert not engine.busy
    assert not engine.scheduler.busy
    assert blocks.available == blocks.pages - 1
    rows = engine.table.spare + 1  # those past it have their pages for good
    assert all(not engine.table.owned(row) for row in range(rows))
    assert not engine.table.table[:rows].any()
    for drafter in engine.drafters.values():
        if isinstance(drafter, Adversary):
            assert not drafter.texts


def ahead(llm: LLM) -> list[GraphKey]:
    """Lets the engine run ahead; the list grows by a key with every step that did."""
    engine, keys = llm.engine, []
    limit = engine.scheduler.max_num_tokens
    engine.captured = CapturedSteps(engine.runner, proposers(engine.drafters, NO_DRAFT), limit)
    run = engine.captured.graphs.run

    def noted(key: GraphKey, *rest: Any) -> None:
        keys.append(key)
        run(key, *rest)

    engine.captured.graphs.run = noted  # type: ignore[method-assign]
    return keys
