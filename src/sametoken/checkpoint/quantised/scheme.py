"""Quantisation scheme that a checkpoint states: `quantization_config`, or Model-Optimizer's own file.

The stored tensors determine the format of a weight. The scheme distinguishes layouts with equal tensors, is compared
with the tensors, and is refused if it needs other arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from sametoken.errors import CheckpointError, UnsupportedModelError, shown
from sametoken.model.keys import Keys
from sametoken.model.unsupported import quantised

KEYS = ("quantization_config", "compression_config")  # of config.json
FLOAT, INTEGER = "float", "int"
OTHERS = "use the unquantised checkpoint, or one in FP8, NVFP4, AWQ or GPTQ"


class WeightScheme(NamedTuple):
    """Storage of the weight of a linear layer.

    Attributes:
        kind: FLOAT or INTEGER.
        bits: bits of a code.
        group: inputs that share a scale; -1 for all, None if not stated.
        block: outputs and inputs that share a scale; None for rows.
        integer_rows: true if products also round the activations to int8.
        zero_offset: number that is added to stored zero points.
    """

    kind: str
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    integer_rows: bool = False
    zero_offset: int = 0


@dataclass(frozen=True)
class Scheme:
    """Quantisation scheme of a checkpoint.

    Attributes:
        tool: `quant_method` of the checkpoint.
        name: name for errors and logs.
        layers: patterns of modules with the storage of their weights; the first match counts.
        ignored: patterns of modules that are not quantised.
    """

    tool: str
    name: str
    layers: tuple[tuple[str, WeightScheme], ...]
    ignored: tuple[str, ...] = ()

    def layer(self, module: str) -> WeightScheme | None:
        """Storage of the weight of a module; None if it is not quantised."""
        if any(fits(pattern, module) for pattern in self.ignored):
            return None
        return next((layer for pattern, layer in self.layers if fits(pattern, module)), None)

    @property
    def bits(self) -> int:
        """Bits of the smallest code."""
        return min(layer.bits for _, layer in self.layers)


def fits(pattern: str, module: str) -> bool:
    """True if a pattern of a quantisation tool matches a module: itself, a parent, a wildcard, "re:" or a class."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if pattern == "Linear" or fnmatchcase(module, pattern):
        return True
    return module.startswith(pattern + ".") or module.endswith("." + pattern) or f".{pattern}." in module


def read_scheme(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> Scheme | None:
    """Read the quantisation scheme of a checkpoint; None if its weights are not quantised.

    Args:
        config: content of config.json.
        modelopt: content of hf_quant_config.json, None if there is no such file.

    Raises:
        UnsupportedModelError: weights of this format are not supported.
        CheckpointError: a value is not of its type.
    """
    key = next((key for key in KEYS if config.get(key) is not None), None)
    inner = (modelopt or {}).get("quantization")
    if key is not None:
        stated, where = config[key], f"config.json has {key!r}"
    elif isinstance(inner, Mapping) and inner.get("quant_algo") is not None:
        stated, where = {**inner, "quant_method": "modelopt"}, "hf_quant_config.json says"
    else:
        return None
    reader = READERS.get(str(stated.get("quant_method"))) if isinstance(stated, Mapping) else None
    if reader is None or (reader is _mxfp4 and "GptOssForCausalLM" not in (config.get("architectures") or ())):
        raise UnsupportedModelError(f"{where}: {quantised(stated)}")
    try:
        return reader(Keys(stated, where.removesuffix(" says").replace(" has", "")))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; {OTHERS}") from error


def _names(keys: Keys, *names: str) -> tuple[str, ...]:
    """Patterns in the lists under any of these keys."""
    found: list[str] = []
    for name in names:
        value = keys.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(f"{keys.where}: {name} is {shown(value)}, expected a list of names")
        for each in value:
            _check_pattern(each, f"{keys.where}: {name}")
        found += value
    return tuple(found)


def _check_pattern(pattern: str, where: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise CheckpointError(f"{where} has {shown(pattern)}, which is no regular expression ({error})") from error


def _fp8(keys: Keys) -> Scheme:
    """Fine-grained FP8 of transformers (Qwen3-FP8, DeepSeek), and FP8 of fbgemm, with one scale per row."""
    keys.choice("fmt", "e4m3", ("e4m3",))
    keys.choice("activation_scheme", "dynamic", ("dynamic", "static"))
    block = keys.values.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise CheckpointError(f"{keys.where}: weight_block_size is {shown(block)}, expected two positive integers")
    layer = WeightScheme(FLOAT, 8, block=None if block is None else (block[0], block[1]))
    ignored = _names(keys, "modules_to_not_convert", "ignored_layers")
    return Scheme("fp8", f"FP8, {'blocks' if block else 'one scale a weight or row'}", (("*", layer),), ignored)


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)


# Algorithms of Model-Optimizer; others need scales of inputs, or arithmetic that is not implemented.
MODELOPT = {
    "FP8": WeightScheme(FLOAT, 8),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme(FLOAT, 8),
    "FP8_PB_WO": WeightScheme(FLOAT, 8, block=(128, 128)),
    "NVFP4": WeightScheme(FLOAT, 4, 16),
    "W4A16_NVFP4": WeightScheme(FLOAT, 4, 16),
    "NVFP4_MLP_ONLY": WeightScheme(FLOAT, 4, 16),
    "MXFP4": WeightScheme(FLOAT, 4, 32),
}


def _modelopt(keys: Keys) -> Scheme:
    algorithm = str(keys.values.get("quant_algo"))
    ignored = _names(keys, "exclude_modules", "ignore")
    if algorithm == "MIXED_PRECISION":
        listed = keys.mapping("quantized_layers")
        layers = tuple((name, _algorithm(Keys(each, keys.where))) for name, each in listed.items())
        if not layers:
            raise CheckpointError(f"{keys.where}: MIXED_PRECISION without quantized_layers, expected a table of them")
        return Scheme("modelopt", "Model-Optimizer, mixed", layers, ignored)
    return Scheme("modelopt", f"Model-Optimizer {algorithm}", (("*", _algorithm(keys)),), ignored)


def _algorithm(keys: Keys) -> WeightScheme:
    return MODELOPT[keys.choice("quant_algo", "", tuple(MODELOPT))]


def _awq(keys: Keys) -> Scheme:
    keys.choice("version", "gemm", ("gemm", "GEMM"))
    bits = keys.integer("bits", keys.integer("w_bit", 4))
    if bits != 4:
        raise UnsupportedModelError(f"{keys.where}: AWQ with {bits} bits is not supported, expected 4")
    layer = WeightScheme(INTEGER, bits, _group(keys, "group_size", "q_group_size"))
    return Scheme("awq", "AWQ, 4-bit integers", (("*", layer),), _names(keys, "modules_to_not_convert"))


def _gptq(keys: Keys) -> Scheme:
    bits = keys.integer("bits", 4)
    if bits not in (4, 8):
        raise UnsupportedModelError(f"{keys.where}: GPTQ with {bits} bits is not supported, expected 4 or 8")
    version = keys.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    if keys.mapping("dynamic"):
        raise UnsupportedModelError(f"{keys.where}: other settings for some modules ('dynamic') are not supported")
    layer = WeightScheme(INTEGER, bits, _group(keys, "group_size"), zero_offset=1 if version == "gptq" else 0)
    return Scheme("gptq", f"GPTQ, {bits}-bit integers", (("*", layer),))


def _mxfp4(keys: Keys) -> Scheme:
    """MXFP4 of gpt-oss: the experts alone, in blocks of 32 inputs."""
    return Scheme("mxfp4", "MXFP4", (("*", WeightScheme(FLOAT, 4, 32)),), _names(keys, "modules_to_not_convert"))


def _group(keys: Keys, *names: str) -> int:
    """Inputs that share a scale, -1 for all, under the first of these keys that exists; 128 without any."""
    name = next((name for name in names if name in keys.values), names[0])
    value = keys.values.get(name, 128)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise CheckpointError(f"{keys.where}: {name} is {shown(value)}, expected -1 or a positive integer")
    return value


FORMATS = (
    "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip


def _compressed(keys: Keys) -> Scheme:
    """compressed-tensors: groups of modules, each with its own weights and activations."""
    keys.choice("format", "dense", FORMATS)
    if keys.mapping("sparsity_config").get("format", "dense") != "dense":
        raise UnsupportedModelError(f"{keys.where}: sparse weights of compressed-tensors are not supported")
    if keys.mapping("transform_config").get("config_groups"):
        raise UnsupportedModelError(f"{keys.where}: rotated weights (transform_config) are not supported")
    layers: list[tuple[str, WeightScheme]] = []
    for name, group in keys.mapping("config_groups").items():
        inner = Keys(group if isinstance(group, Mapping) else {}, f"{keys.where}: config_groups {name!r}")
        if inner.values.get("format") is not None:
            inner.choice("format", "dense", FORMATS)
        if inner.values.get("weights") is not None:
            layer = _compressed_layer(inner)
            layers += [(target, layer) for target in _names(inner, "targets") or ("Linear",)]
    if not layers:
        raise CheckpointError(f"{keys.where}: config_groups has no weights, expected at least one group with weights")
    named = sorted({f"{layer.kind}{layer.bits}" for _, layer in layers})
    # A pattern of one layer counts before one of a class.
    ordered = sorted(layers, key=lambda each: each[0] == "Linear")
    return Scheme(
        "compressed-tensors", f"compressed-tensors, {' and '.join(named)}", tuple(ordered), _names(keys, "ignore")
    )


def _compressed_layer(keys: Keys) -> WeightScheme:
    weights = Keys(keys.mapping("weights"), f"{keys.where} weights")
    rows = keys.mapping("input_activations")
    kind = weights.choice("type", INTEGER, (INTEGER, FLOAT))
    bits = weights.integer("num_bits", 8)
    if bits not in (4, 8):
        raise UnsupportedModelError(
            f"{keys.where}: compressed-tensors with {bits} bits is not supported, expected 4 or 8"
        )
    strategy = weights.choice("strategy", "tensor", ("tensor", "channel", "group", "tensor_group", "block"))
    block = weights.values.get("block_structure") if strategy == "block" else None
    if strategy == "block" and not _is_block(block):
        raise CheckpointError(f"{weights.where}: block_structure is {shown(block)}, expected two positive integers")
    grouped = "group" in strategy
    integer_rows = (
        kind == INTEGER and bits == 8 and not grouped and rows.get("type") == INTEGER and rows.get("num_bits") == 8
    )
    return WeightScheme(
        kind, bits, weights.integer("group_size") if grouped else -1, None if block is None else (block[0], block[1]),
        integer_rows,
    )  # fmt: skip


def _gguf(keys: Keys) -> Scheme:
    """Blocks of llama.cpp; the file states the type of each tensor."""
    types = _names(keys, "types")
    found = [int(digit[0]) for name in types if (digit := re.search("[1-9]", name))]
    if not found or len(found) < len(types):
        raise CheckpointError(f"{keys.where}: types is {shown(list(types))}, expected types of GGUF such as 'Q8_0'")
    bits = min(found)
    return Scheme("gguf", f"GGUF, {', '.join(types)}", (("*", WeightScheme(INTEGER, bits)),))


READERS = {
    "gguf": _gguf,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}


def listed(patterns: tuple[str, ...]) -> str:
    """Patterns as text for an error message."""
    return ", ".join(map(repr, patterns[:8])) or "nothing"
