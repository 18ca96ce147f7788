"""Lookup of kinds of drafters by name, by a head's configuration or by directory.

A broken kind of another distribution is left out with a warning; naming it is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from sametoken.drafters.base import Drafter
from sametoken.errors import ConfigError, SametokenError
from sametoken.heads.files import Files
from sametoken.heads.kind import HeadConfig, HeadKind, Weighted
from sametoken.kinds import OURS, Kind, kinds, named
from sametoken.options.speculation import SpeculativeConfig

LOG = logging.getLogger("sametoken")
# Required attributes of a drafter; `drafters.base.Drafter` implements all but the last two.
PROTOCOL = ("taps", "namespace", "runs_model", "admit", "observe", "release", "slots", "nodes", "propose")
T = TypeVar("T")


@cache
def weighted(name: str) -> Weighted:
    """Serving of the drafters of a kind with weights.

    Raises:
        ConfigError: there is no such kind, or the distribution of the kind is broken.
    """
    kind = named(name)
    base = HeadKind if kind.weights == "head" else Weighted
    found: Weighted = _made(kind, kind, lambda made: "" if isinstance(made, base) else f"not a {base.__name__}")
    return found


def head_kind(config: HeadConfig) -> HeadKind:
    """Kind of the heads with this class of configuration."""
    found = weighted(config.kind)
    assert isinstance(found, HeadKind), f"{config.kind} is no kind of heads"
    return found


def head_kinds() -> list[HeadKind]:
    """Kinds of heads that can be loaded, in the order in which they are tried on a directory."""
    found = _working((kind for kind in kinds() if kind.weights == "head"), lambda kind: weighted(kind.name))
    return [each for each in found.values() if isinstance(each, HeadKind)]


def recognise(files: Files) -> HeadKind | None:
    """Kind of the head in a directory, None if no kind recognises it.

    Raises:
        ConfigError: config.json names a kind whose distribution is broken.
    """
    for kind in head_kinds():
        try:
            if kind.recognises(files):
                return kind
        except Exception as error:
            if kind.kind.source == OURS:
                raise
            _leave_out(f"drafter {kind.kind.name!r} of {kind.kind.source}: recognises failed: {error}")
    for each in kinds():
        if each.weights == "head" and each.marked(files.config):
            weighted(each.name)
    return None


def model_free_drafters(config: SpeculativeConfig) -> dict[str, Drafter]:
    """Drafters without weights by method, including those for which a request has data.

    Raises:
        ConfigError: `config` names one whose distribution is broken.
    """
    free = [kind for kind in kinds() if kind.weights is None]
    return _working(free, lambda kind: build_model_free(kind.name, config), config.method)


def build_model_free(name: str, config: SpeculativeConfig) -> Drafter:
    """Build the drafter of a kind without weights.

    Raises:
        ConfigError: the distribution of the kind is broken.
    """

    def problem(made: Any) -> str:
        missing = [part for part in PROTOCOL if not hasattr(made, part)]
        return f"not a drafter: it has no {missing[0]!r}" if missing else ""

    found: Drafter = _made(named(name), config, problem)
    return found


def draft_model(config: Mapping[str, Any], method: str | None = None) -> Kind:
    """Kind of drafts of a whole model: the named one, otherwise the one that config.json marks.

    Args:
        config: content of the model's config.json.
        method: method that the user named; methods other than draft models are ignored.
    """
    usual, *others = [kind for kind in kinds() if kind.weights == "model"]
    asked = [kind for kind in (usual, *others) if kind.name == method]
    return next(iter(asked or [kind for kind in others if kind.marked(config)]), usual)


def _made(kind: Kind, argument: object, problem: Callable[[Any], str]) -> Any:
    """Call `drafts` of a kind with an argument; errors name the distribution of the kind.

    Args:
        problem: function from the result to an error message, "" for none.
    """
    build = kind.load(kind.drafts)
    if kind.source == OURS:
        return build(argument)
    advice = f"update or uninstall {kind.source}"
    try:
        made = build(argument)
    except SametokenError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"drafter {kind.name!r} of {kind.source} cannot be built ({reason}); {advice}") from error
    if wrong := problem(made):
        raise ConfigError(f"drafter {kind.name!r} of {kind.source}: {kind.drafts} made {made!r}, {wrong}; {advice}")
    return made


def _working(found: Iterable[Kind], make: Callable[[Kind], T], asked: str | None = None) -> dict[str, T]:
    """Build an object for each kind, by name; a kind that fails is left out unless the caller named it."""
    made = {}
    for kind in found:
        try:
            made[kind.name] = make(kind)
        except SametokenError as error:
            if kind.source == OURS or kind.name == asked:
                raise
            _leave_out(str(error))
    return made


@cache
def _leave_out(reason: str) -> None:
    LOG.warning(f"a drafter is left out: {reason}")
