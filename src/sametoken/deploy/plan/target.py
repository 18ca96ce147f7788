"""A target for an engine: whether the engine reads its format, and whether so many ranks divide it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sametoken import embedded
from sametoken.checkpoint.hub import read_config, read_json, resolve
from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError
from sametoken.heads.kind import ENGINES
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.runtime.ranks import RankPart

OURS = "sametoken"
# What vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.2 name among their formats (quant_method of config.json).
COMMON = {"awq", "gptq", "fp8", "modelopt", "mxfp4"}
FORMATS = {
    "vllm": COMMON | {"compressed-tensors", "fbgemm_fp8", "quark", "torchao"},
    "sglang": COMMON | {"compressed-tensors", "gguf", "bitsandbytes", "quark", "auto-round"},
    "trtllm": COMMON,
}
NEVER = {"vllm": {"gguf"}, "trtllm": {"gguf", "bitsandbytes"}}  # vLLM reads GGUF with a plugin only


def target_place(model: str) -> str:
    """A target as another program finds it: its directory where it is one, else its Hub id."""
    path = user_path(embedded.target(model))
    return str(path.absolute()) if path.exists() else model


def check_target(model: str, engine: str, ranks: int) -> tuple[str, ...]:
    """Refuse a target that the engine cannot read, or not in so many ranks; one of the Hub is not looked at.

    Returns:
        What was not checked, a sentence each.

    Raises:
        ConfigError: says what the engine can have. SametokenError: the files cannot be read.
    """
    if not user_path(embedded.target(model)).exists():
        return ()
    directory = resolve(embedded.target(model), weights=False, index=True)
    if engine == OURS:
        if ranks > 1:
            cut(ModelConfig.from_hf(read_config(directory)), RankPart(0, ranks), "--tp-size")
        return ()
    stated = read_json(directory / "config.json") or {}  # the engine may read what ours does not
    name = ENGINES[engine]
    method = (stated.get("quantization_config") or {}).get("quant_method")
    if method in NEVER.get(engine, ()):
        others = [f" or {title}" for other, title in ENGINES.items() if method in FORMATS.get(other, ())]
        raise ConfigError(
            f"{model} is {method}, which {name} does not read; use --engine sametoken{''.join(others)}, or another "
            "checkpoint of the model"
        )
    _check_ranks(stated.get("text_config") or stated, ranks, f"ranks of {name} cannot share")
    unknown = method is not None and method not in FORMATS[engine]
    return (f"{model} is {method}; whether {name} reads that was not checked",) if unknown else ()


def _check_ranks(stated: Mapping[str, Any], ranks: int, problem: str) -> None:
    """Refuse ranks that cannot share the heads; each has whole ones, or several have the same keys and values."""
    heads = stated.get("num_attention_heads")
    if not isinstance(heads, int):  # the engine knows the model better
        return
    shared = stated.get("num_key_value_heads") or heads
    fitting = [count for count in range(1, heads + 1) if not (heads % count or (shared % count and count % shared))]
    if ranks not in fitting:
        raise ConfigError(
            f"--tp-size {ranks}: the model has {heads} heads and {shared} of keys and values, which {ranks} {problem}; "
            f"use one of {', '.join(map(str, fitting))}"
        )
