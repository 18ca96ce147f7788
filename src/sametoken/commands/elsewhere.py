"""Command lines of `sametoken prepare` and `sametoken train` for other machines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sametoken import embedded
from sametoken.checkpoint.paths import user_path
from sametoken.commands import prepare, train
from sametoken.commands.options import Chosen, given_words
from sametoken.errors import ConfigError

# Keys are passed in the environment (OPENAI_API_KEY), because other users may read a script.
LEFT_OUT = ("shard", "show", "json", "hidden_states", "api_key")
PREPARE = tuple(each for each in prepare.OPTIONS if each.name not in LEFT_OUT)
TRAIN = tuple(each for each in train.OPTIONS if each.name not in ("num_gpu", "config", "dry_run", "offline_data"))
PROGRAM = "sametoken.cli"  # after `python -m`


def everywhere(name: str | None) -> str:
    """Name of a model for another working directory: a path that exists here becomes absolute."""
    if name is None or name == embedded.NAME:
        return embedded.NAME
    path = user_path(name)
    return str(path.absolute()) if path.exists() else name


def placed(values: Chosen, names: Iterable[str]) -> Chosen:
    """Copy of the values, with absolute paths for the options of these names that are set."""
    return Chosen(values | {name: _absolute(values[name]) for name in names if values[name]}, values.given)


def _absolute(value: str | list[str]) -> str | list[str]:
    return everywhere(value) if isinstance(value, str) else [everywhere(each) for each in value]


def output_directory(given: str) -> Path:
    """Absolute path of a directory for outputs.

    Raises:
        ConfigError: the path is empty, or is a file.
    """
    if not given:
        raise ConfigError(f"the directory to write is {given!r}; expected --output DIR")
    output = Path(os.path.abspath(user_path(given)))
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file; expected a directory, or a name that is not taken")
    return output


def _read_by_nodes(values: Chosen, names: Iterable[str]) -> None:
    """Refuse options whose files do not exist, before a job fails on every node."""
    for name in names:
        given = values[name] or []
        for each in [given] if isinstance(given, str) else given:
            if not user_path(each).exists():
                raise ConfigError(
                    f"--{name.replace('_', '-')} {each}: no such file or directory; expected one that this machine and "
                    "all nodes see"
                )


def prepare_words(model: str | None, values: Chosen) -> tuple[list[str], Path]:
    """Words after `python -m` that write hidden states, without the option for the part; and their directory."""
    if not values["data"] or values["output"] is None:
        raise ConfigError("--data or --output is missing; expected --data FILE.jsonl --output DIR")
    _read_by_nodes(values, ("data",))
    output = output_directory(values["output"])
    words = given_words(PREPARE, placed(values, ("data",)), ("output",))
    return [PROGRAM, "prepare", everywhere(model), *words, "--output", str(output), "--hidden-states"], output


def train_words(model: str | None, values: Chosen) -> tuple[list[str], Path]:
    """Words after `python -m` that train, and their directory."""
    if model is not None and values["model"] is not None:
        raise ConfigError(f"got the models {model} and --model {values['model']}; leave one of them out")
    _read_by_nodes(values, ("data", "eval_data"))
    output = output_directory(values["output_dir"])
    given = placed(values, ("data", "eval_data", "init_from"))
    words = given_words(TRAIN, given, ("model", "output_dir"))
    return [PROGRAM, "train", everywhere(model or values["model"]), *words, "--output-dir", str(output)], output
