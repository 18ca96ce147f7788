"""Recipes of training: YAML files, and words `key=value`, with options of `sametoken train` and their values.

Keys are the names of the options, or those of NVIDIA's Model Optimizer (0.47) in its sections.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from sametoken.checkpoint.paths import user_path
from sametoken.dialects.yaml_mapping import parse_mapping
from sametoken.errors import ConfigError
from sametoken.files import read_text
from sametoken.learning.modes import ALIASES, MODES, TRAINED

# Sections for a kind of head, and their modes.
HEADS = {name: mode for name in MODES if TRAINED[mode := ALIASES.get(name, name)].kind.weights == "head"}
SECTIONS = ("metadata", "model", "data", "training", *HEADS)
KINDS = "speculative_"  # before the name of a section, in the type of a recipe
ABSENT = "dflash"  # section of Model Optimizer's recipes for DFlash, Domino and DSpark

RENAMED = {
    "model_name_or_path": "model", "offline_data_path": "data", "data_path": "data", "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "train_bs", "learning_rate": "lr", "log_steps": "logging_steps",
}  # fmt: skip
INERT: dict[str, tuple[str, ...]] = {
    "metadata": ("description",),
    "model": ("trust_remote_code", "use_fake_base_for_offline"),
    "data": ("mode", "lazy_preprocess"),
    "training": (
        "bf16_full_eval", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
        "ddp_find_unused_parameters", "ddp_timeout", "disable_tqdm", "estimate_ar", "eval_accumulation_steps",
        "eval_strategy", "logging_strategy", "per_device_eval_batch_size", "remove_unused_columns", "report_to",
        "save_strategy", "tf32",
    ),
}  # fmt: skip
INERT |= dict.fromkeys(
    HEADS, ("eagle_use_torch_compile", "eagle_enable_nvtx", "eagle_export_rope_scaling", "eagle_offline")
)
# Keys with one possible value, and the remedy for another.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "chat_template": ((), "the target's own chat template is used, and no generation tags are needed"),
    "draft_vocab_cache": ((), "give draft_vocab_size: the vocabulary is counted in the data"),
    "vlm_img_dir": ((), "heads are trained on text"),
    "vlm_processor": ((), "heads are trained on text"),
    "sample_size": ((-1,), "all conversations are used; shorten the file"),
    "streaming_server_url": ((), "use `sametoken prepare --hidden-states --url` and give its directory as data"),
    "streaming_model_name": ((), "use `sametoken prepare --hidden-states --url` and give its directory as data"),
    "final_aux_is_base_hidden": ((False,), "the last state is stored apart from the taps"),
    "cp_size": ((1,), "rows are not divided among processes; shorten training_seq_len"),
    "dp_shard_size": ((1,), "give num_gpu and fsdp"),
    "fp16": ((False,), "give dtype: bfloat16 or float32"),
    "save_only_model": ((False,), "checkpoints have the state of the optimiser"),
}


class Setting(NamedTuple):
    """Value of an option, and its place in a recipe."""

    value: Any
    origin: str


def _truth(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}, expected true or false")
    return value


def _optimiser(value: Any, key: str) -> dict[str, Any]:
    return {"optim": "adamw" if str(value).startswith("adamw") else value}


def _most_steps(value: Any, key: str) -> dict[str, Any]:
    return {} if value == -1 else {"max_steps": value}


def _evaluations(value: Any, key: str) -> dict[str, Any]:
    return {"eval_steps": value} if isinstance(value, int) and value > 0 else {}


Conversion = Callable[[Any, str], dict[str, Any]]
CONVERTED: Mapping[str, Conversion] = {
    "answer_only_loss": lambda value, key: {"all_tokens": not _truth(value, key)},
    "bf16": lambda value, key: {"dtype": "bfloat16"} if _truth(value, key) else {},
    "optim": _optimiser,
    "max_steps": _most_steps,
    "ar_validate_steps": _evaluations,
}


def read_recipe(file: str | None, words: Sequence[str], options: Collection[str]) -> dict[str, Setting]:
    """Options that a recipe and words `key=value` set, by name; words replace values of the file.

    Args:
        file: YAML file.
        words: further keys with their sections, as `training.learning_rate=1e-4`, and values in YAML.
        options: names of the options.

    Raises:
        ConfigError: the file cannot be read, it is for another kind of draft, a key is unknown, or a value is not
            possible here; the message has the key.
    """
    parts = [] if file is None else [_sections(_parse(file), file)]
    parts.append(_of_words(words))
    kind: dict[str, Setting] = {}
    found: dict[str, Setting] = {}
    heads: dict[str, dict[str, Setting]] = {section: {} for section in HEADS}
    for part in parts:
        for section, name, setting in part:
            if section in HEADS and name not in INERT.get(section, ()):
                _merge(heads[section], name, setting)
                kind.setdefault("mode", Setting(HEADS[section], setting.origin))
            elif (section, name) == ("metadata", "recipe_type"):
                kind["mode"] = Setting(_mode(setting.value, setting.origin), setting.origin)
            else:
                found |= _options(section, name, setting, options)
    found = kind | found
    for section, config in heads.items():
        if config:
            found = _of_head(section, config, str(found["mode"].value)) | found
    return found


def _parse(file: str) -> dict[Any, Any]:
    try:
        text = read_text(user_path(file))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {file}: {reason}; expected a YAML file of options") from error
    stated = parse_mapping(text, file, "num_epochs: 2")
    try:
        json.dumps(stated, default=str, skipkeys=True)
    except ValueError as error:
        raise ConfigError(f"{file}: a value contains itself by an anchor; write the values out") from error
    return stated


Entry = tuple[str, str, Setting]  # section ("" for none), key, and value


def _sections(stated: Mapping[Any, Any], file: str) -> Iterator[Entry]:
    """Keys of a file with their sections; keys without a value are left out."""
    if ABSENT in stated:
        raise ConfigError(f"{file}: {_no_kind(stated[ABSENT])}")
    for name, value in stated.items():
        if name in SECTIONS and isinstance(value, Mapping):
            for inner, each in value.items():
                if each is not None:
                    yield name, str(inner), Setting(each, f"{file}: {name}.{inner}")
        elif value is not None:
            yield "", str(name), Setting(value, f"{file}: {name}")


def _no_kind(section: Any) -> str:
    """Message about a recipe for a kind of draft that cannot be trained."""
    architecture = section.get("dflash_architecture_config") if isinstance(section, Mapping) else None
    kind = architecture.get("projector_type", ABSENT) if isinstance(architecture, Mapping) else ABSENT
    return f"a recipe for {kind}, which cannot be trained here; kinds that can: {', '.join(TRAINED)}"


def _of_words(words: Sequence[str]) -> Iterator[Entry]:
    """Keys of words `key=value` with their sections."""
    for word in words:
        key, _, text = word.partition("=")
        section, dot, name = key.partition(".")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError):  # a text with signs that have a meaning in YAML
            value = text
        if dot and section == ABSENT:
            raise ConfigError(f"{word}: {_no_kind(None)}")
        if dot and section not in SECTIONS:
            raise ConfigError(f"{word}: unknown section {section!r}, expected {', '.join(SECTIONS)}, or none")
        name, deeper, inner = (name if dot else key).partition(".")
        if deeper:
            value = {inner: value}
        if value is not None:
            yield section if dot else "", name, Setting(value, word)


def _merge(config: dict[str, Setting], name: str, setting: Setting) -> None:
    """Set a key of a head's section; a mapping is merged into the one before."""
    before = config.get(name)
    if before is not None and isinstance(before.value, Mapping) and isinstance(setting.value, Mapping):
        setting = Setting({**before.value, **setting.value}, f"{before.origin}, {setting.origin}")
    config[name] = setting


def _mode(recipe_type: Any, origin: str) -> str:
    section = str(recipe_type).removeprefix(KINDS)
    if section == ABSENT:
        raise ConfigError(f"{origin}: {_no_kind(None)}")
    if section not in HEADS or section == recipe_type:
        raise ConfigError(f"{origin} is {recipe_type!r}, expected {KINDS} with one of {', '.join(HEADS)}")
    return HEADS[section]


def _options(section: str, name: str, setting: Setting, options: Collection[str]) -> dict[str, Setting]:
    """Options that a key outside the sections of heads sets."""
    ours = name.replace("-", "_")
    if ours in CONVERTED:
        return {key: Setting(value, setting.origin) for key, value in CONVERTED[ours](*setting).items()}
    if ours in ONLY:
        possible, remedy = ONLY[ours]
        if setting.value not in possible:
            raise ConfigError(f"{setting.origin} is {setting.value!r}: {remedy}")
        return {}
    if ours in INERT.get(section, ()) or (not section and ours not in options and ours in INERT["training"]):
        return {}
    ours = RENAMED.get(ours, ours)
    if ours in options:
        return {ours: setting}
    known = {each: each for each in options} | RENAMED | {each: each for each in CONVERTED}
    near = difflib.get_close_matches(ours, known, n=1)
    remedy = f"did you mean {known[near[0]]!r}?" if near else "`sametoken train --help` has all keys"
    raise ConfigError(f"{setting.origin}: unknown key {name!r}; {remedy}")


def _of_head(section: str, config: Mapping[str, Setting], mode: str) -> dict[str, Setting]:
    """Options that the section of a kind of head sets."""
    mode = ALIASES.get(mode, mode)
    if mode not in MODES or not mode.startswith(section):
        raise ConfigError(f"{next(iter(config.values())).origin}: a section for {HEADS[section]}, but mode is {mode!r}")
    kind, training = TRAINED[mode]
    names = kind.load(training.objective).modelopt
    names.read(mode, training, {name: setting.value for name, setting in config.items()})  # checks them together
    found: dict[str, Setting] = {}
    for name, (value, origin) in config.items():
        read = names.read(mode, training, {name: value})
        for group in (read.head, read.loss):
            found |= {key: Setting(getattr(group, key), origin) for key in group.model_fields_set}
        if read.vocabulary is not None:
            raise ConfigError(f"{origin}: {ONLY['draft_vocab_cache'][1]}")
        layers = {key: each for key, each in read.architecture.items() if key not in names.only}
        if "draft_vocab_size" in layers:
            found["draft_vocab_size"] = Setting(layers.pop("draft_vocab_size"), origin)
        if layers:
            before = json.loads(found["eagle_config"].value) if "eagle_config" in found else {}
            found["eagle_config"] = Setting(json.dumps(before | layers), origin)
    return found
