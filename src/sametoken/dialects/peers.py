"""Translation of other servers' command lines into words of `sametoken serve`, by tables of their options.

A line of a table gives the effect of an option. `set` sets an option of ours, directly or by a rule. `none` has no
effect here and cannot change an output (placement, memory, speed, logs). `refused` would change outputs or needs an
unsupported feature, and has advice. Words that are not in the table are passed on, so that our options work too.
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
OURS = ("--default-sampling", "--override-generation-config")  # our options, joined with sampling options of a peer
READ = {"VLLM_API_KEY", "LLAMA_API_KEY"}  # variables that `sametoken serve` reads itself


class PeerOption(NamedTuple):
    """An option of a peer.

    Attributes:
        names: spellings of the option; a name without dashes is an environment variable alone.
        value: placeholder of the value, "" for a switch; brackets mark an optional value, a leading + several words.
        env: environment variable of the option, "" for none.
        kind: "set", "none" or "refused".
        what: for "set", our option or the rule with its argument; for "refused", the advice, after allowed values.
    """

    names: tuple[str, ...]
    value: str
    env: str
    kind: str
    what: str

    def negates(self, spelling: str) -> bool:
        """True if this spelling of a switch turns the switch off."""
        first, word = self.names[0].lstrip("-"), spelling.lstrip("-").replace("_", "-")
        if self.value or word == first:
            return False
        opposite = any(first.startswith(old) and word.startswith(new) for old, new in OPPOSITES.items())
        return opposite or word.startswith("no-") or word in ("nkvo", "nr", "nocb")

    @property
    def off(self) -> str | None:
        """Spelling that turns the switch off, or None if there is none."""
        return next(filter(self.negates, self.names), None)


Rule = Callable[["Passage", str, str], None]  # adds to a passage, from a value and the spelling of its option


@dataclass
class Passage:
    """Translation of a peer's command line.

    Attributes:
        words: arguments of `sametoken serve`.
        env: environment variables that the process needs.
        idle: given options without effect, as they were written.
        sampling: default sampling parameters of requests.
        template: default variables of the chat template.
        seen: values of options that are interpreted together, by a name of each.
        drafts: keys of vLLM's speculative configuration.
        cached: types of the KV cache, by the spelling of their options.
        rope: keys of the target's RoPE, see `options.rope`.
    """

    words: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)
    cached: dict[str, str] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, *values: str) -> None:
        """Set an option of ours."""
        self.words += [f"{name}={values[0]}"] if values and values[0].startswith("-") else [name, *values]

    def finish(self) -> None:
        """Add the options that were collected from several words: sampling, template, drafts and RoPE."""
        sampling = {name: value for name, value in self.sampling.items() if value is not None}
        if sampling:
            self.set("--default-sampling", json.dumps(sampling))
        if self.template:
            self.set("--default-template-options", json.dumps(self.template))
        if self.drafts:
            self.set("--speculative-config", json.dumps(self.drafts))
        if self.rope:
            self.set("--rope-scaling", json.dumps(self.rope))


@cache
def table(peer: str) -> tuple[PeerOption, ...]:
    """Options of a peer, which is "llama_server" or "vllm"."""
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
    """Translate a command line and an environment into `to`; the command line has priority.

    Args:
        whole: words that are no beginnings of options; None: no word is, otherwise one that begins a single option
            names it, as Python's parser of command lines allows.

    Raises:
        ConfigError: an option would change outputs or needs an unsupported feature, or its value is wrong.
    """
    given = set[str]()
    for row, spelling, values in _options_in(rows, arguments, to, whole):
        given.add(row.names[0])
        take(row, spelling, values, rules, to)
    for row in rows:
        if row.env and row.names[0] not in given:
            for spelling, values in _of_environment(row, environ):
                take(row, spelling, values, rules, to, f"{row.env}={environ.get(row.env, '')}")


def unread(environ: Mapping[str, str], peers: Mapping[str, str]) -> list[str]:
    """Names of set environment variables of peers that have no meaning here.

    Args:
        peers: prefixes of the names of variables, each with the table that contains known names, "" for none.
    """
    known = {row.env for peer in peers.values() if peer for row in table(peer)}
    known |= {_denied(env) for env in known}
    return sorted(name for name in environ if name.startswith(tuple(peers)) and name not in known | READ)


def _options_in(
    rows: Sequence[PeerOption], arguments: Sequence[str], to: Passage, whole: Collection[str] | None
) -> Iterator[tuple[PeerOption, str, list[str]]]:
    """Options of a command line that are in the table, with spelling and values; other words are added to `to`."""
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
    """Spelling of the only option that begins with `begun`; `begun` if it is complete, or begins none or several."""
    if begun in known:
        return begun
    near = {row.names[0]: name for name, row in known.items() if name.startswith(begun)}
    return next(iter(near.values())) if len(near) == 1 else begun


def _put(into: dict[str, Any], keys: Sequence[str], stated: str) -> None:
    """Add a value below nested keys, from `--option.key.key value`; a key that ends in + appends to a list."""
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
    """Spelling and values of an option that is set in the environment; empty if it is not set."""
    stated = environ.get(row.env, "")
    if row.value and stated:
        yield row.names[0], [stated]
    elif stated.lower() in TRUE:
        yield row.names[0], []
    elif row.off is not None and (stated.lower() in FALSE or _denied(row.env) in environ):
        yield row.off, []
    elif stated and stated.lower() not in FALSE:
        raise ConfigError(f"{row.env}={stated}: expected one of {', '.join((*TRUE, *FALSE))}")


def _denied(env: str) -> str:
    """Older environment variable of llama-server that turns a switch off."""
    return env.replace("_ARG_", "_ARG_NO_") if "_ARG_" in env else ""


def take(
    row: PeerOption, spelling: str, values: Sequence[str], rules: Mapping[str, Rule], to: Passage, variable: str = ""
) -> None:
    """Translate one option into `to`.

    Args:
        variable: text of the setting in messages, if it does not come from a command line.
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
        if row.value and row.env and variable.startswith(f"{row.env}="):
            spelling = row.env
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
    """Rule for a text of values separated by commas, each of which sets `option`."""

    def take(to: Passage, value: str, _: str) -> None:
        for each in filter(None, map(str.strip, value.split(","))):
            to.set(option, each)

    return take


def noted(name: str) -> Rule:
    """Rule for a value that is interpreted together with others, kept in `Passage.seen`."""

    def take(to: Passage, value: str, _: str) -> None:
        to.seen[name] = value

    return take


def variable(name: str, fixed: str = "") -> Rule:
    """Rule for a value that is set as an environment variable; `fixed` replaces the value."""

    def take(to: Passage, value: str, _: str) -> None:
        to.env[name] = fixed or value

    return take


def json_object(value: str, spelling: str) -> dict[str, Any]:
    """JSON object of a text; raises `ConfigError` for any other text."""
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
