"""Command lines of other servers, read by tables of their options, as words of `sametoken serve`.

A line of a table says what an option is here: `set` sets an option of ours, or a rule reads it; `none` cannot change a
text (placement, memory, speed, logs); `refused` would change one, or what is served, and has advice. Words that are not
in the table are passed on, so that options of ours work too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from sametoken.errors import ConfigError

TRUE, FALSE = ("1", "true", "on", "enabled", "yes"), ("0", "false", "off", "disabled", "no")
OPPOSITES = {"enable-": "disable-", "disable-": "enable-"}
OURS = ("--default-sampling", "--override-generation-config")  # joined with what a peer's options say
READ = {"VLLM_API_KEY", "LLAMA_API_KEY"}  # variables that `sametoken serve` reads itself


class PeerOption(NamedTuple):
    """An option of a peer.

    Attributes:
        names: its spellings; one without dashes is a variable of the environment alone.
        value: what its value is, "" for a switch; in brackets it may be left out, after + there may be several words.
        env: its variable of the environment, "" for none.
        kind: set, none or refused. `what`: how or why.
    """

    names: tuple[str, ...]
    value: str
    env: str
    kind: str
    what: str

    def negates(self, spelling: str) -> bool:
        """True if a spelling of a switch turns it off."""
        first, word = self.names[0].lstrip("-"), spelling.lstrip("-").replace("_", "-")
        if self.value or word == first:
            return False
        opposite = any(first.startswith(old) and word.startswith(new) for old, new in OPPOSITES.items())
        return opposite or word.startswith("no-") or word in ("nkvo", "nr", "nocb")

    @property
    def off(self) -> str | None:
        """The spelling that turns it off, None where there is none."""
        return next(filter(self.negates, self.names), None)


Rule = Callable[["Passage", str, str], None]  # reads a value and the spelling before it


@dataclass
class Passage:
    """Translation of a peer's command line.

    Attributes:
        words: after `sametoken serve`. `env`: variables that the process needs.
        idle: what was given and has no effect.
        sampling: parameters of requests that do not say otherwise. `template`: variables of the chat template.
        seen: values of options that are read together. `drafts`: keys of a speculative configuration.
    """

    words: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, *values: str) -> None:
        """Set an option of ours."""
        self.words += [f"{name}={values[0]}"] if values and values[0].startswith("-") else [name, *values]

    def finish(self) -> None:
        """Add the options that several words make."""
        sampling = {name: value for name, value in self.sampling.items() if value is not None}
        if sampling:
            self.set("--default-sampling", json.dumps(sampling))
        if self.template:
            self.set("--default-template-options", json.dumps(self.template))
        if self.drafts:
            self.set("--speculative-config", json.dumps(self.drafts))


@cache
def table(peer: str) -> tuple[PeerOption, ...]:
    """The options of a peer, "llama_server" or "vllm"."""
    text = files("sametoken.dialects").joinpath(f"{peer}.tsv").read_text(encoding="utf-8")
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(PeerOption(tuple(names.split(",")), value, env, kind, what) for names, value, env, kind, what in lines)


def read(
    rows: Sequence[PeerOption],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    rules: Mapping[str, Rule],
    to: Passage,
    whole: Collection[str] | None = None,
) -> None:
    """Add what a command line and the environment say, in which the command line wins.

    Args:
        whole: words that are no beginnings of options; None: no word is, otherwise one that begins a single option
            names it, as Python's parser of command lines allows.

    Raises:
        ConfigError: an option would change texts or what is served, or its value makes no sense.
    """
    given = set[str]()
    for row, spelling, values in _said(rows, arguments, to, whole):
        given.add(row.names[0])
        take(row, spelling, values, rules, to)
    for row in rows:
        if row.env and row.names[0] not in given:
            for spelling, values in _of_environment(row, environ):
                take(row, spelling, values, rules, to, f"{row.env}={environ.get(row.env, '')}")


def unread(environ: Mapping[str, str], peers: Mapping[str, str]) -> list[str]:
    """Variables of peers that are set and have a meaning to nobody here.

    Args:
        peers: beginnings of their names, and the table that is read beside, "" for none.
    """
    known = {row.env for peer in peers.values() if peer for row in table(peer)}
    known |= {_denied(env) for env in known}
    return sorted(name for name in environ if name.startswith(tuple(peers)) and name not in known | READ)


def _said(
    rows: Sequence[PeerOption], arguments: Sequence[str], to: Passage, whole: Collection[str] | None
) -> Iterator[tuple[PeerOption, str, list[str]]]:
    """The options of a command line that the table has, with their values; the other words are passed on."""
    known = {name: row for row in (*rows, PeerOption(OURS, "JSON", "", "set", "sampling")) for name in row.names}
    parts: dict[str, dict[str, Any]] = {}
    words = list(arguments)
    while words:
        word, equals, stated = words.pop(0).partition("=")
        dotted = word.startswith("-") and word not in known and not _is_number(word)
        name, *keys = word.split(".") if dotted else [word]
        name = name if name in known else name.replace("_", "-") if name.startswith("-") else name
        if whole is not None and name.startswith("--") and name not in whole:
            name = _completed(name, known)
        row = known.get(name)
        if row is None or (equals and not row.value):
            to.words.append(word + equals + stated)
        elif not row.value:
            yield row, name, []
        elif equals or (words and not (row.value[0] == "[" and words[0].startswith("-"))):
            values = [stated if equals else words.pop(0)]
            while row.value[0] == "+" and not equals and words and not words[0].startswith("-"):
                values.append(words.pop(0))
            if keys:
                _put(parts.setdefault(name, {}), keys, values[0])
            else:
                yield row, name, values
        elif row.value[0] == "[":
            yield row, name, ["on"]
        else:
            raise ConfigError(f"{word} needs a value: {row.value.lstrip('+')}")
    for name, keys_and_values in parts.items():
        yield known[name], name, [json.dumps(keys_and_values)]


def _completed(begun: str, known: Mapping[str, PeerOption]) -> str:
    """The spelling of the one option that begins so; `begun` where it is whole, or begins none or several."""
    if begun in known:
        return begun
    near = {row.names[0]: name for name, row in known.items() if name.startswith(begun)}
    return next(iter(near.values())) if len(near) == 1 else begun


def _put(into: dict[str, Any], keys: Sequence[str], stated: str) -> None:
    """Add a value below keys, as `--option.key.key+ value` says it."""
    *above, last = keys
    for key in above:
        into = into.setdefault(key, {})
    if last.endswith("+"):
        into.setdefault(last[:-1], []).extend(stated.split(","))
        return
    try:
        into[last] = json.loads(stated)
    except ValueError:
        into[last] = stated


def _of_environment(row: PeerOption, environ: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Value of an option in the environment."""
    stated = environ.get(row.env, "")
    if row.value and stated:
        yield row.names[0], [stated]
    elif stated.lower() in TRUE:
        yield row.names[0], []
    elif row.off is not None and (stated.lower() in FALSE or _denied(row.env) in environ):
        yield row.off, []


def _denied(env: str) -> str:
    """The older variable of llama-server that turns a switch off."""
    return env.replace("_ARG_", "_ARG_NO_") if "_ARG_" in env else ""


def take(
    row: PeerOption, spelling: str, values: Sequence[str], rules: Mapping[str, Rule], to: Passage, variable: str = ""
) -> None:
    """Add what one option comes to.

    Args:
        variable: how it was said, where that is no command line.
    """
    shown = variable or " ".join((spelling, *values))
    if row.kind == "none" or (row.kind == "refused" and row.negates(spelling)):
        to.idle.append(shown)
    elif row.kind == "refused":
        allowed, colon, advice = row.what.partition(": ") if row.value else ("", "", "")
        if not colon or " " in allowed:
            raise ConfigError(f"{shown}: {row.what}")
        if not set(values) <= set(allowed.split("|")):
            raise ConfigError(f"{shown}: {advice}")
        to.idle.append(shown)
    elif row.what.startswith("sampling:"):
        _, name, kind = row.what.split(":")
        folder, _, own = name.rpartition(".")
        place = to.sampling.setdefault(folder, {}) if folder else to.sampling
        place[own] = _number(kind, values[0] if values else "", shown)
    elif row.what.startswith("--"):
        to.seen.pop(row.what, None)
        for value in values:
            to.set(row.what, value)
        if not row.value:
            to.set(row.what.replace("--", "--no-", 1) if row.negates(spelling) else row.what)
    else:
        rule, _, argument = row.what.partition(":")
        for value in values or [argument]:
            rules[rule](to, value, f"{spelling}:{argument}" if argument and row.value else spelling)


def _number(kind: str, value: str, shown: str) -> object:
    try:
        if kind == "true":
            return True
        if kind == "float":
            return float(value)
        number = int(value)
    except ValueError as error:
        raise ConfigError(f"{shown}: expected a number") from error
    if kind == "seed":
        return None if number in (-1, 2**32 - 1) else number
    return None if number < 0 and kind != "int" else number


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def each_of(option: str) -> Rule:
    """A rule for values that commas separate."""

    def take(to: Passage, value: str, _: str) -> None:
        for each in filter(None, map(str.strip, value.split(","))):
            to.set(option, each)

    return take


def noted(name: str) -> Rule:
    """A rule for a value that is read with others."""

    def take(to: Passage, value: str, _: str) -> None:
        to.seen[name] = value

    return take


def variable(name: str, fixed: str = "") -> Rule:
    """A rule for a value that is a variable of the environment here."""

    def take(to: Passage, value: str, _: str) -> None:
        to.env[name] = fixed or value

    return take


def json_object(value: str, spelling: str) -> dict[str, Any]:
    """An object of JSON; raises `ConfigError` for anything else."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{spelling} {value!r}: expected a JSON object")
    return found


def sampling_rule(to: Passage, value: str, spelling: str) -> None:
    """Read sampling parameters as JSON."""
    to.sampling.update(json_object(value, spelling))


def template_rule(to: Passage, value: str, spelling: str) -> None:
    """Read variables of the chat template as JSON."""
    to.template.update(json_object(value, spelling))
