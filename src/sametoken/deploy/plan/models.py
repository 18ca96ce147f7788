"""Models of a plan for an engine: checks of the target's format and ranks, kind and layout of the draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sametoken import embedded
from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.hub import read_config, read_json, resolve
from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.places import draft_directory
from sametoken.errors import ConfigError
from sametoken.heads.files import Files
from sametoken.heads.kind import ENGINES
from sametoken.heads.read import is_head, read_head, stored_dtype
from sametoken.heads.registry import draft_model, head_kind
from sametoken.heads.write import write_head
from sametoken.kinds import named
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.runtime.ranks import RankPart

OURS = "sametoken"
# Formats (quant_method of config.json) that vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.2 list.
COMMON = {"awq", "gptq", "fp8", "modelopt", "mxfp4"}
FORMATS = {
    "vllm": COMMON | {"compressed-tensors", "fbgemm_fp8", "quark", "torchao"},
    "sglang": COMMON | {"compressed-tensors", "gguf", "bitsandbytes", "quark", "auto-round"},
    "trtllm": COMMON,
}
NEVER = {"vllm": {"gguf"}, "trtllm": {"gguf", "bitsandbytes"}}  # vLLM reads GGUF with a plugin only


def target_place(model: str) -> str:
    """Absolute path of a target that is a directory or a named file, else its Hub id."""
    if embedded.published(model) is not None:
        return str((resolve(model) / LINK).resolve())
    path = user_path(embedded.target(model))
    return str(path.absolute()) if path.exists() else model


def check_target(model: str, engine: str, ranks: int) -> tuple[str, ...]:
    """Raise ConfigError for a target that the engine cannot read, or not in `ranks` ranks; Hub ids are not checked.

    Returns:
        Notes on unchecked facts, a sentence each.

    Raises:
        ConfigError: the engine does not read the format, or the heads cannot be shared by the ranks.
        SametokenError: the files cannot be read.
    """
    if embedded.published(model) is None and not user_path(embedded.target(model)).exists():
        return ()
    directory = resolve(embedded.target(model), weights=False, index=True)
    if engine == OURS:
        if ranks > 1:
            cut(ModelConfig.from_hf(read_config(directory)), RankPart(0, ranks), "--tp-size")
        return ()
    stated = read_json(directory / "config.json") or {}  # unparsed: the engine may read other models than ours
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
    """Raise ConfigError unless ranks share the query heads equally, and the KV heads equally or by replication."""
    heads = stated.get("num_attention_heads")
    if not isinstance(heads, int):  # left to the engine
        return
    shared = stated.get("num_key_value_heads") or heads
    fitting = [count for count in range(1, heads + 1) if not (heads % count or (shared % count and count % shared))]
    if ranks not in fitting:
        raise ConfigError(
            f"--tp-size {ranks}: the model has {heads} heads and {shared} of keys and values, which {ranks} {problem}; "
            f"use one of {', '.join(map(str, fitting))}"
        )


READ_BY = {"vllm": ("vllm", "speculators"), "sglang": ("sglang",), "trtllm": ("trtllm",)}  # layouts, by engine
# Keys of config.json that may differ between files of one layout.
ANY = ("dtype", "torch_dtype", "speculators_config", "speculators_version", "base_model_name_or_path")


class Placed(NamedTuple):
    """Draft in a layout of the engine.

    Attributes:
        place: directory or Hub id.
        method: our name of its kind.
        notes: written files and unchecked facts, a sentence each.
        layers: blocks of the target whose outputs the draft reads; () if none, or if unknown.
    """

    place: str
    method: str
    notes: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


def place_draft(draft: str, method: str | None, engine: str, target: str, out: str | None) -> Placed:
    """Find the kind of a draft, and write a head in the engine's layout if its own layout differs.

    A Hub id is downloaded, unless `method` is stated and `out` is None.

    Args:
        draft: directory or Hub id.
        method: our name of the kind as the user stated it, or None.
        engine: key of `READ_BY`.
        target: directory or Hub id of the target.
        out: directory for a head in another layout, or None.

    Raises:
        SametokenError: the draft cannot be read, the engine cannot run it, or another layout is needed without `out`.
    """
    local = user_path(embedded.draft(draft)).exists()
    if not local and out is None and method is not None:
        reason = f"{draft} was not read; --out DIR downloads it and checks its layout"
        return Placed(draft, method, (reason,) if named(method).weights == "head" else ())
    directory = draft_directory(draft).absolute()
    if not is_head(directory):
        found = draft_model(read_config(directory), method).name
        return _agreed(Placed(str(directory) if local else draft, found), draft, method)
    facts = ModelConfig.from_hf(read_config(resolve(embedded.target(target), weights=False, index=True)))
    dtype = stored_dtype(directory)
    loaded = read_head(directory, facts, dtype, "cpu", pack=False)
    kind = head_kind(loaded.config)
    placed = Placed(str(directory) if local else draft, loaded.config.kind, layers=loaded.config.taps)
    placed = _agreed(placed, draft, method)
    files = Files.of(directory)
    apart = [
        _apart(files, kind.lay_out(loaded.module, facts, layout, target)._asdict())
        for layout in READ_BY[engine]
        if not kind.refusals(loaded.config, layout)
    ]
    if apart and not all(apart):
        return placed
    if out is None and apart:
        raise ConfigError(
            f"{draft} is not in a layout of {ENGINES[engine]} ({apart[0]}); give --out DIR, a directory for the head "
            "in such a layout"
        )
    folder = user_path(out or ".").absolute()  # `write_head` refuses a head that the engine cannot run before it writes
    write_head(loaded.module, folder, facts, layout=engine, target_name=target, dtype=dtype)
    return placed._replace(place=str(folder), notes=(f"{folder}: the head in {ENGINES[engine]}'s layout",))


def _agreed(placed: Placed, draft: str, method: str | None) -> Placed:
    """Return `placed`. Raises ConfigError if the user stated another method."""
    if method not in (None, placed.method):
        raise ConfigError(f"{draft} is a draft for --method {placed.method}, got --method {method}; leave --method out")
    return placed


def _apart(files: Files, written: Mapping[str, Any]) -> str:
    """First difference between files and a layout; "" if there is none."""
    config = written["config"]
    for key, value in config.items():
        if key not in ANY and files.config.get(key, None) != value:
            return f"config.json: {key} is {files.config.get(key)!r}, expected {value!r}"
    names = files.seen.keys() ^ written["tensors"].keys()
    return f"tensor {min(names)}" if names else ""
