"""Random settings of every option against plain decoding of each request by itself: not one token may differ.

    python tests/settings_fuzz.py [--seconds 600] [--seed N] [--served]

Every round draws a draft, all settings of `LLM` and a batch of requests that arrive over time; `--served` gives the
settings to `sametoken serve` as options and the requests over HTTP. A failure names the seed of its round, which
`--seed` repeats; it exits with 1.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from cli_checks import speak
from engine_checks import PLAIN, check_idle, disturb, llama, prompts
from head_checks import eagle_config, random_weights, shape_of
from sametoken import LLM, RequestSpeculation, SamplingParams
from sametoken.engine.completion import Completion
from sametoken.errors import ConfigError, MemoryPlanError
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.write import write_head
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.speculation.structure import StructuredOutputs

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
KINDS: dict[str | None, str] = {"draft": "draft_target", "eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa"}
FREE = ("ngram", "suffix", "none", "auto", None)
# Several ranks are processes, seconds to start: tests of the room `parallel` vary them.
RANKS = {"tensor_parallel_size", "tensor_parallel_check", "draft_tensor_parallel_size"}
# A token map is a file: tests/checkpoint/test_token_ranking.py and tests/engine/test_narrowed.py write some.
# RoPE by option changes the target: tests/engine/test_rope_scaling.py compares plain and speculative with it.
FIXED = {
    "device",
    "draft_token_map",
    "rope_scaling",
    "deterministic",
    "cuda_graphs",
    "tokenizer",
    "chat_template",
    "generation_config",
    *RANKS,
}
FORMATS = ("none", "none", "int8", "int8_weight_only", "int4", "int4_g128")
TAG = {"triggers": ["a"], "structures": [{"begin": "a<", "schema": {"type": "integer"}, "end": ">"}]}
POOL = 48  # requests that rounds choose from


@dataclass
class Models:
    """A target and what may guess for it, on disk; plain engines and their answers, made when asked for."""

    target: str
    drafts: dict[str, str]
    requests: list[tuple[list[int], SamplingParams]]
    oracles: dict[tuple[str, str, str], LLM] = field(default_factory=dict)
    answers: dict[tuple[str, str, str, int], tuple[Any, ...]] = field(default_factory=dict)

    def answer(self, dtype: str, quantization: str, kv_dtype: str, number: int) -> tuple[Any, ...]:
        """What plain decoding of a request by itself says."""
        key = dtype, quantization, kv_dtype
        if (*key, number) not in self.answers:
            if key not in self.oracles:
                options = {"dtype": dtype, "quantization": quantization, "max_batch_size": 1}
                cache = {"enable_block_reuse": False, "dtype": kv_dtype}
                self.oracles[key] = LLM(self.target, kv_cache=cache, **options)
            prompt, params = self.requests[number]
            done = self.oracles[key].generate(prompt, replace(params, speculative=PLAIN))
            self.answers[*key, number] = tuple(map(said, done))
        return self.answers[*key, number]


def said(done: Any) -> tuple[Any, ...]:
    return done.token_ids, done.text, done.finish_reason, done.stop_reason, done.logprobs, done.prompt_logprobs


def make_models(root: Path, seed: int = 0) -> Models:
    """Small random models; the draft model resembles the target."""
    target = llama(root / "target", **SHAPE)
    model = disturb(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), 0.05)
    model.save_pretrained(root / "draft")
    speak(root / "draft")
    shape = shape_of(target)
    medusa = MedusaConfig(hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, num_heads=4, num_layers=2)
    heads = {
        "eagle3": EagleHead(eagle_config(shape), torch.float32),
        "eagle": EagleHead(eagle_config(shape, 1), torch.float32),
        "medusa": MedusaHeads(medusa, torch.float32),
    }
    for name, head in heads.items():
        random_weights(head)
        write_head(head, root / name, shape, target_name="tiny")
    luck = random.Random(seed)
    texts = [text for round_ in range(POOL // 6) for text in prompts(6, seed=seed + round_, longest=60)]
    requests = [(text, draw_params(luck)) for text in texts]
    return Models(target, {name: str(root / name) for name in ("draft", *heads)}, requests)


def draw_params(luck: random.Random) -> SamplingParams:
    """Everything that a request may ask of its tokens."""
    given: dict[str, Any] = {
        "temperature": luck.choice([0.0, 0.0, 0.4, 0.8, 1.0, 1.5]), "seed": luck.randrange(100),
        "max_tokens": luck.randint(3, 40), "ignore_eos": luck.random() < 0.7,
    }  # fmt: skip
    choices: dict[str, list[Any]] = {
        "n": [2, 3], "top_p": [0.5, 0.9, 1e-60], "top_k": [1, 5, 40], "min_p": [0.05, 0.3], "logprobs": [0, 2],
        "repetition_penalty": [1.3, 0.8], "presence_penalty": [0.7, -1.0], "frequency_penalty": [0.4],
        "logit_bias": [{5: 3.0, 70: -100.0}], "bad_words": [["a", "b c"]], "min_tokens": [1, 3],
        "prompt_logprobs": [0, 2],
        "stop": [["e"], ["ab", "7"]], "stop_token_ids": [[20, 21, 50]], "include_stop_str_in_output": [True],
        "skip_special_tokens": [False],
    }  # fmt: skip
    for name in luck.sample(sorted(choices), luck.choice([0, 0, 1, 2, 4])):
        given[name] = luck.choice(choices[name])
    if luck.random() < 0.15:
        forms: list[dict[str, Any]] = [{"regex": "(a|bc)+[0-9]{2,4}"}, {"choice": ["yes", "no", "yesterday"]},
                                       {"json": {"type": "array", "items": {"type": "boolean"}}},
                                       {"structural_tag": TAG}]  # fmt: skip
        given["structured_outputs"] = StructuredOutputs(**luck.choice(forms))
        given.pop("min_tokens", None), given.pop("bad_words", None)
    return SamplingParams(**given)


@dataclass
class Round:
    """One set of settings; each group by the names of its fields."""

    draft: str | None
    speculative: dict[str, Any]
    engine: dict[str, Any]
    cache: dict[str, Any]


def draw_round(luck: random.Random) -> Round:
    """A draft, and a value for every option that changes how tokens are computed."""
    draft = luck.choice([*KINDS, *KINDS, None])
    length, batch = luck.choice([1, 2, 3, 4, 5, 8, 16]), luck.choice([1, 2, 3, 5, 8])
    window = luck.choice([0, 0, 2])
    least, most = sorted((luck.randint(1, 4), luck.randint(1, 6)))
    schedule = {1: length, **({batch: luck.randint(0, length)} if batch > 1 else {})}
    limits: dict[str, Any] = luck.choice([{}, {}, {"draft_len_schedule": schedule}, {"max_concurrency": batch}])
    speculative = {
        "method": luck.choice([KINDS[draft], "auto", None] if draft else FREE), "max_draft_len": length,
        "adaptive": luck.random() < 0.4, "draft_len_schedule": None, "max_concurrency": None,
        "acceptance_window": window, "acceptance_length_threshold": luck.choice([0.2, 1.0]) if window else 0.0,
        "tree_top_k": luck.choice([1, 1, 2, 4, 7]),
        "max_total_draft_tokens": luck.choice([None, None, 1, 2, 3, 6, 11, 30]), "min_matching_ngram_size": least,
        "max_matching_ngram_size": most, "is_use_oldest": luck.random() < 0.5, "is_public_pool": luck.random() < 0.5,
        "suffix_decoding_max_tree_depth": luck.choice([2, 5, 24]),
        "suffix_decoding_max_cached_requests": luck.choice([0, 1, 10_000]),
        "suffix_decoding_max_spec_factor": luck.choice([0.5, 1.0, 4.0]),
        "suffix_decoding_min_token_prob": luck.choice([0.0, 0.1, 0.9]), "draft_window": luck.choice([1, 4, 512]),
        "draft_vocab_size": luck.choice([None, 20, 60, 10**6]) if draft == "draft" else None, **limits,
    }  # fmt: skip
    engine = {
        "dtype": luck.choice(["float32", "bfloat16", "auto"]), "quantization": luck.choice(FORMATS),
        "draft_quantization": luck.choice(FORMATS), "max_batch_size": batch,
        "max_num_tokens": luck.choice([2, 5, 16, 64, 512]),
        "max_mixed_prefill_tokens": luck.choice([1, 3, 64]), "max_prefill_share": luck.choice([0.1, 0.5, 1.0]),
        "max_seq_len": luck.choice([None, 100, 110, 128]), "cap_max_seq_len": luck.random() < 0.5,
        "weight_cache": luck.random() < 0.5,
    }  # fmt: skip
    cache = {
        "tokens_per_block": luck.choice([1, 3, 8, 16, 32]), "enable_block_reuse": luck.random() < 0.7,
        "max_tokens": luck.choice([None, 180, 256, 700]), "free_memory_fraction": luck.choice([None, 0.5, 0.9]),
        "dtype": luck.choice(["auto", "bfloat16", "int8", "fp8"]),
    }  # fmt: skip
    return Round(draft, speculative, engine, cache)


def draw_way(luck: random.Random, llm: LLM) -> RequestSpeculation | None:
    """How a request asks to be drafted: as the engine does, or otherwise."""
    if luck.random() < 0.6:
        return None
    return luck.choice([
        RequestSpeculation(enabled=False), RequestSpeculation(method=luck.choice([*llm.methods, "auto", "none"])),
        RequestSpeculation(max_draft_len=luck.randint(0, llm.speculative.max_draft_len)),
        RequestSpeculation(adaptive=luck.random() < 0.5), RequestSpeculation(prediction="abc Abc 0123 yes"),
    ])  # fmt: skip


def check_round(models: Models, seed: str) -> str:
    """Runs one round in this process; how it went: "ran" or "refused".

    Raises:
        AssertionError: a token differs, or something is left behind.
    """
    luck = random.Random(seed)
    drawn = draw_round(luck)
    try:
        draft = models.drafts[drawn.draft] if drawn.draft else None
        llm = LLM(models.target, draft, drawn.speculative, kv_cache=drawn.cache, **drawn.engine)
    except (ConfigError, MemoryPlanError):
        return "refused"
    going: list[tuple[int, Any]] = []
    for number in luck.sample(range(POOL), luck.randint(1, 10)):
        prompt, params = models.requests[number]
        if len(prompt) + (params.max_tokens or 0) <= llm.max_seq_len:
            own = replace(params, speculative=draw_way(luck, llm))
            requests = llm.requests([prompt], own)
            going.append((number, requests))
            for request in requests:
                llm.engine.add(request)
            for _ in range(luck.choice([0, 1, 3])):
                llm.engine.step()
    for _ in range(20_000):
        if not llm.engine.busy:
            break
        llm.engine.step()
    dtype, form = str(llm.engine.runner.decoder.dtype).removeprefix("torch."), drawn.engine["quantization"]
    for number, requests in going:
        got = tuple(said(Completion.of(request)) for request in requests)
        expected = models.answer(dtype, form, drawn.cache["dtype"], number)
        assert got == expected, f"seed {seed}: {drawn}\nrequest {number} {requests[0].params}\n{got}\n{expected}"
    check_idle(llm.engine)
    return "ran"


def flags(drawn: Round) -> list[str]:
    """The settings of a round as options of `sametoken serve`."""
    words = []
    groups = (("", drawn.speculative), ("", drawn.engine), ("kv-cache-", drawn.cache))
    for prefix, group in groups:
        for name, value in group.items():
            dashed = prefix + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{dashed}" if value else f"--no-{dashed}")
            elif isinstance(value, Mapping):
                words += [f"--{dashed}", ",".join(f"{size}:{length}" for size, length in value.items())]
            elif value is not None:
                words += [f"--{dashed}", str(value)]
    return words


def check_served(models: Models, seed: str) -> str:
    """The same round through the command line and HTTP, all requests at once."""
    luck = random.Random(seed)
    drawn = draw_round(luck)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    draft = ["--draft", models.drafts[drawn.draft]] if drawn.draft else []
    command = [sys.executable, "-m", "sametoken.cli", "serve", models.target, *draft, *flags(drawn)]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([*command, "--port", str(port), "--threads", "1"], stdout=log, stderr=log)
        try:
            return _ask(models, luck, drawn, f"http://127.0.0.1:{port}", server)
        except Exception as error:
            log.seek(0)
            raise AssertionError(f"seed {seed}: {' '.join(command)}\n{error}\n{log.read()[-3000:]}") from error
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
            assert code in (0, 2), code


def _ask(models: Models, luck: random.Random, drawn: Round, url: str, server: subprocess.Popen[Any]) -> str:
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(8) as pool:
        while server.poll() is None:
            try:
                longest = client.get("/v1/models").raise_for_status().json()["data"][0]["max_model_len"]
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        else:
            assert server.returncode == 2, "it neither served nor refused"
            return "refused"
        lengths = [len(text) + (params.max_tokens or 0) for text, params in models.requests]
        fitting = [number for number, length in enumerate(lengths) if length <= longest]
        numbers = luck.sample(fitting, min(len(fitting), 12))
        bodies = [body_of(models.requests[number]) for number in numbers]
        replies = pool.map(lambda body: client.post("/v1/completions", json=body), bodies)
        dtype = "float32" if drawn.engine["dtype"] == "auto" else drawn.engine["dtype"]
        for number, reply in zip(numbers, replies, strict=True):
            reply.raise_for_status()
            got = [(choice["text"], choice["finish_reason"]) for choice in reply.json()["choices"]]
            expected = models.answer(dtype, drawn.engine["quantization"], drawn.cache["dtype"], number)
            assert got == [(text, reason) for _, text, reason, *_ in expected], (number, models.requests[number], got)
    return "served"


def body_of(request: tuple[list[int], SamplingParams]) -> dict[str, Any]:
    prompt, params = request
    known = {each.name: getattr(params, each.name) for each in fields(params)}
    form = params.structured_outputs
    asked = {name: value for name, value in known.items() if value not in (None, ()) and value is not form}
    if form is not None:
        given = {name: value for name, value in asdict(form).items() if value not in (None, False)}
        asked["structured_outputs"] = given
    if "logit_bias" in asked:
        asked["logit_bias"] = {str(token): value for token, value in asked["logit_bias"].items()}
    return {"prompt": prompt, **asked}


def missing() -> set[str]:
    """Settings that no round draws."""
    drawn = draw_round(random.Random(0))
    groups = ((SpeculativeConfig, drawn.speculative), (EngineConfig, drawn.engine), (KVCacheConfig, drawn.cache))
    return {name for owner, group in groups for name in set(owner.model_fields) - set(group)} - FIXED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed")
    parser.add_argument("--served", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("sametoken").setLevel(logging.ERROR)
    check, began, counts = check_served if chosen.served else check_round, time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as root:
        models = make_models(Path(root))
        base = f"{time.time():.0f}"
        seeds = (chosen.seed,) if chosen.seed else (f"{base}-{number}" for number in range(10**9))
        for seed in seeds:
            if time.monotonic() - began > chosen.seconds:
                break
            try:
                counts[check(models, seed)] += 1
            except Exception as error:  # goes on: a long run is to find all there is
                counts["failed"] += 1
                print(f"FAILED seed {seed}: {type(error).__name__}: {str(error)[:2500]}", flush=True)
    print(dict(counts))
    sys.exit(bool(counts["failed"]))


if __name__ == "__main__":
    main()
