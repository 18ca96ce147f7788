"""Translation of the command line and environment of `vllm serve` into words of `sametoken serve`.

The table of its options is vllm.tsv.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sametoken import kinds
from sametoken.dialects.peers import (
    TRUE,
    Passage,
    Rule,
    json_object,
    noted,
    read,
    table,
    template_rule,
    variable,
)
from sametoken.dialects.vllm import overrides, without_part
from sametoken.errors import ConfigError

VERSION = "0.33.0"  # release of vLLM that has these options and replies
SIZES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip  # factors of the suffixes of vLLM's numbers
DTYPES = {"half": "float16", "float": "float32"}
# Our names of the parameters that vLLM reads from a generation config, by vLLM's names.
SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
QUANTIZATION = {"int8": "int8", "int8_weight_only": "int8_weight_only", "int4": "int4", "none": "none"}  # our formats
# Quantisation methods that the checkpoint's files state; other methods round weights as they are loaded.
STATED = (
    "awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed-tensors", "gguf", "modelopt",
    "modelopt_fp4", "modelopt_mxfp8", "mxfp4", "gpt_oss_mxfp4", "bitblas", "gptq_bitblas", "auto-round", "inc", "quark",
)  # fmt: skip
REASONING = {"deepseek_r1": "deepseek_r1", "qwen3": "qwen3", "openai_gptoss": "openai_gptoss", "": "none"}
MARKS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}  # marks that the chat template shows too
WHOLE = ("--max-seq-len", "--tool-parser")  # options of ours that begin longer options of vLLM
COARSER = ("fp8_e5m2", "nvfp4")  # types of the KV cache that are less exact than ours of 8 bits
LEVELS = {"critical": "error", "trace": "debug"}
# Keys of --structured-outputs-config that change outputs only if they are true.
ONLY_FALSE = ("disable_any_whitespace", "disable_additional_properties")


def vllm(arguments: Sequence[str], environ: Mapping[str, str]) -> Passage:
    """Translate the command line of `vllm serve` and its environment variables.

    Raises:
        ConfigError: an option would change outputs or needs an unsupported feature, or its value is wrong.
    """
    to = Passage(seen={"host": "0.0.0.0", "origins": "[]", "reasoning": "none"})
    read(table("vllm"), [*arguments], environ, RULES, to, WHOLE)
    if "file" in to.seen:
        file, to = to.seen["file"], Passage(seen={"host": "0.0.0.0", "origins": "[]", "reasoning": "none"})
        words = [*_of_file(file, bool(arguments) and not arguments[0].startswith("-")), *arguments]
        read(table("vllm"), words, environ, RULES, to, WHOLE)
    if to.seen.get("long", "").lower() in TRUE and "--max-model-len" in to.words and not to.rope:
        to.rope["max_position_embeddings"] = int(to.words[to.words.index("--max-model-len") + 1])
    if "--uds" not in to.words:
        to.set("--host", to.seen["host"])
    to.set("--reasoning-parser", to.seen["reasoning"])
    to.set("--reported-version", VERSION)
    to.set("--ignore-unknown-fields")
    if "--enable-request-id-headers" not in to.words:
        to.set("--no-enable-request-id-headers")
    for origin in _origins(to.seen["origins"]):
        to.set("--cors-origin", origin)
    to.finish()
    return to


def _of_file(path: str, without_model: bool) -> Iterator[str]:
    """Words of a command line with the options of a YAML file.

    Args:
        without_model: leave the file's model out, because the command line names one.
    """
    import yaml  # `LLM` imports this module

    try:
        stated = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a YAML file of options") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}; give a file of options") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"--config {path}: expected options and their values, for example port: 8000")
    known = {name for row in table("vllm") for name in row.names}
    for key, value in stated.items():
        name = f"--{str(key).replace('_', '-')}"
        if name == "--model" and without_model:
            continue
        if value is True:
            yield name
        elif value is False:
            if (opposite := f"--no-{name[2:]}") in known:
                yield opposite
        elif isinstance(value, list):
            yield from (name, *map(str, value)) if value else ()
        elif isinstance(value, dict):
            yield from (name, json.dumps(value))
        elif value is not None:
            yield from (name, str(value))


def _origins(stated: str) -> list[str]:
    try:
        given = json.loads(stated)
    except ValueError:
        given = stated.split(",")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f'--allowed-origins {stated}: expected a JSON list of texts, for example ["*"]')
    return [each.strip() for each in given]


def _count(value: str, spelling: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", value.strip())
    if found is None:
        raise ConfigError(f"{spelling} {value}: expected a whole number, for example 4096 or 4k")
    return str(int(float(found[1]) * SIZES.get(found[2], 1)))


def _tokens(to: Passage, value: str, spelling: str) -> None:
    name, _, option = spelling.partition(":")
    to.set(option, _count(value, name))


def _length(to: Passage, value: str, spelling: str) -> None:
    if value.lower() not in ("auto", "-1"):
        to.set("--max-model-len", _count(value, spelling))


def _dtype(to: Passage, value: str, spelling: str) -> None:
    name = DTYPES.get(value, value)
    if name == "float16" and not _has_cuda():
        to.idle.append(f"{spelling} {value} (the CPU computes in bfloat16)")
        name = "bfloat16"
    to.set("--dtype", name)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _quantization(to: Passage, value: str, spelling: str) -> None:
    if value in QUANTIZATION:
        to.set("--quantization", QUANTIZATION[value])
    elif value in STATED:
        to.idle.append(f"{spelling} {value} (the checkpoint states it)")
    else:
        raise ConfigError(
            f"{spelling} {value}: a checkpoint's own quantization is found without it; to round weights as they are "
            f"loaded give one of {', '.join(QUANTIZATION)}"
        )


def _sampling(to: Passage, value: str, spelling: str) -> None:
    for name, stated in json_object(value, spelling).items():
        if name in SAMPLING:
            to.sampling[SAMPLING[name]] = stated
        else:
            to.idle.append(f"{spelling} {name}")


def _own_sampling(to: Passage, value: str, spelling: str) -> None:
    """Read `--default-sampling`, which has every parameter by our names."""
    if spelling == "--default-sampling":
        to.sampling.update(json_object(value, spelling))
    else:
        _sampling(to, value, spelling)


def _generation(to: Passage, value: str, spelling: str) -> None:
    if value not in ("auto", "vllm", "none"):
        raise ConfigError(
            f"{spelling} {value}: expected auto or vllm; put other values into --override-generation-config"
        )
    to.set("--generation-config", value)


def _reasoning(to: Passage, value: str, spelling: str) -> None:
    value = "" if value.lower() == "none" else value
    to.seen["reasoning"] = REASONING.get(value, "auto")
    if value not in REASONING:
        to.idle.append(f"{spelling} {value} (the chat template's marks are read)")


def _marks(to: Passage, value: str, spelling: str) -> None:
    for name, stated in json_object(value, spelling).items():
        if name == "reasoning_parser":
            _reasoning(to, str(stated), spelling)
        elif stated != MARKS.get(name):
            words = "the marks of reasoning are found in the chat template; leave it out"
            raise ConfigError(f"{spelling} {name} {stated!r}: {words}")
        else:
            to.idle.append(f"{spelling} {name}")


def _structured(to: Passage, value: str, spelling: str) -> None:
    for name, stated in json_object(value, spelling).items():
        if name == "reasoning_parser":
            _reasoning(to, str(stated), spelling)
        elif name in ONLY_FALSE and stated:
            raise ConfigError(f"{spelling} {name}: requests choose the form of their grammar; leave it out")
        else:
            to.idle.append(f"{spelling} {name}")


def _level(to: Passage, value: str, _: str) -> None:
    to.set("--log-level", LEVELS.get(value.lower(), value.lower()))


def _logging(to: Passage, value: str, spelling: str) -> None:
    for name, stated in json_object(value, spelling).items():
        if name == "log_level":
            _level(to, str(stated), spelling)
        else:
            to.idle.append(f"{spelling} {name}")


def _access(to: Passage, _: str, spelling: str) -> None:
    to.set("--no-access-log" if spelling == "--disable-uvicorn-access-log" else "--access-log")


def _graphs(to: Passage, _: str, spelling: str) -> None:
    to.set("--cuda-graphs" if spelling.startswith("--no-") else "--no-cuda-graphs")


def _overrides(to: Passage, value: str, spelling: str) -> None:
    """Read keys of config.json, or the value of one key as `spelling` names it."""
    option, _, key = spelling.partition(":")
    try:
        to.rope |= overrides({key: _number_or_text(value)} if key else value) or {}
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {error}") from error


def _number_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _drafts(to: Passage, value: str, spelling: str) -> None:
    if value in ("", "None"):
        return
    stated = json_object(value, spelling)
    if (lacking := without_part(stated.get("method"))) is not None:
        to.idle.append(f"{spelling} {value} ({lacking})")  # no draft changes a token
    else:
        to.drafts.update(stated)


def _draft(to: Passage, value: str, spelling: str) -> None:
    _, _, key = spelling.partition(":")
    name = value.strip("[]")
    if key == "model" and name != value and name in kinds.aliases("vllm"):  # "[ngram]", of older releases
        key, value = "method", name
    to.drafts[key] = int(value) if value.isdigit() else value


def _memory(to: Passage, value: str, _: str) -> None:
    to.set("--kv-cache-free-memory-fraction", value)


def _cache(to: Passage, value: str, spelling: str) -> None:
    if value in COARSER or value.startswith("turboquant"):
        to.idle.append(f"{spelling} {value} (kept as fp8, E4M3 with a scale for each token and head)")
        value = "fp8"
    to.set("--kv-cache-dtype", value)


def _drain(to: Passage, value: str, spelling: str) -> None:
    to.set("--drain-seconds", _count(value, spelling))


def _hf_token(to: Passage, value: str, _: str) -> None:
    if value != "on":  # "on": no value, for the token of `hf auth login`, which the Hub's client uses anyway
        to.env["HF_TOKEN"] = value


def _device(to: Passage, value: str, _: str) -> None:
    to.set("--device", value)


def _chat_template(to: Passage, value: str, _: str) -> None:
    to.set("--chat-template", value)


def _invariant(to: Passage, value: str, _: str) -> None:
    if value.strip() not in ("", "0"):
        to.set("--deterministic")


def _cpus(to: Passage, value: str, spelling: str) -> None:
    if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
        to.set("--cpus", value)
    elif value != "auto":
        to.idle.append(f"{spelling} {value}")


def _body(to: Passage, value: str, spelling: str) -> None:
    size = int(_count(value, spelling))
    if size:  # 0 is no limit
        to.set("--max-body", str(size))
    else:
        to.idle.append(f"{spelling} {value}")


RULES: Mapping[str, Rule] = {
    "config": noted("file"), "long": noted("long"), "host": noted("host"), "origins": noted("origins"),
    "tokens": _tokens, "length": _length, "dtype": _dtype, "quantization": _quantization, "sampling": _own_sampling,
    "generation": _generation, "reasoning": _reasoning, "marks": _marks, "structured": _structured, "level": _level,
    "logging": _logging, "access": _access, "graphs": _graphs, "overrides": _overrides, "drafts": _drafts,
    "draft": _draft, "memory": _memory, "drain": _drain, "hf_token": _hf_token, "template": template_rule,
    "chat_template": _chat_template, "device": _device, "invariant": _invariant, "cache": _cache, "cpus": _cpus,
    "body": _body, "downloads": variable("HF_HUB_CACHE"), "devices": variable("CUDA_VISIBLE_DEVICES"),
}  # fmt: skip
