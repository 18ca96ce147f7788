"""Commands that run on other machines: the words of `sametoken prepare` and `sametoken train` there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sametoken import embedded
from sametoken.checkpoint.paths import user_path
from sametoken.commands import prepare, train
from sametoken.commands.options import Chosen, given_words
from sametoken.errors import ConfigError

PREPARE = tuple(each for each in prepare.OPTIONS if each.name not in ("shard", "show", "json", "hidden_states"))
TRAIN = tuple(each for each in train.OPTIONS if each.name != "num_gpu")
PROGRAM = "sametoken.cli"  # after `python -m`


def everywhere(name: str | None) -> str:
    """A model's name as it is understood in another working directory: a path that exists here becomes absolute."""
    if name is None or name == embedded.NAME:
        return embedded.NAME
    path = user_path(name)
    return str(path.absolute()) if path.exists() else name


def placed(values: Chosen, names: Iterable[str]) -> Chosen:
    """The same with absolute paths where the options of these names are given."""
    return Chosen(values | {name: _absolute(values[name]) for name in names if values[name]}, values.given)


def _absolute(value: str | list[str]) -> str | list[str]:
    return everywhere(value) if isinstance(value, str) else [everywhere(each) for each in value]


def prepare_words(model: str | None, values: Chosen) -> tuple[list[str], Path]:
    """The words of `python -m` that write hidden states, without the part; and where they write."""
    if not values["data"] or values["output"] is None:
        raise ConfigError("--data or --output is missing; expected --data FILE.jsonl --output DIR")
    output = user_path(values["output"]).absolute()
    words = given_words(PREPARE, placed(values, ("data",)), ("output",))
    return [PROGRAM, "prepare", everywhere(model), *words, "--output", str(output), "--hidden-states"], output


def train_words(model: str | None, values: Chosen) -> tuple[list[str], Path]:
    """The words of `python -m` that train, and where they write."""
    if model is not None and values["model"] is not None:
        raise ConfigError(f"got the models {model} and --model {values['model']}; leave one of them out")
    output = user_path(values["output_dir"]).absolute()
    given = placed(values, ("data", "eval_data", "init_from"))
    words = given_words(TRAIN, given, ("model", "output_dir"))
    return [PROGRAM, "train", everywhere(model or values["model"]), *words, "--output-dir", str(output)], output
