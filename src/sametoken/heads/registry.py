"""Kinds of drafters by what they belong to: a name, a head's configuration, a directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from sametoken.drafters.base import Drafter
from sametoken.errors import ConfigError, SametokenError
from sametoken.heads.files import Files
from sametoken.heads.kind import HeadConfig, HeadKind, Weighted
from sametoken.kinds import OURS, Kind, kinds, named
from sametoken.options.speculation import SpeculativeConfig


@cache
def weighted(name: str) -> Weighted:
    """How the drafters of a kind with weights are served.

    Raises:
        ConfigError: there is no such kind, or its distribution is broken.
    """
    kind = named(name)
    found: Weighted = kind.load(kind.drafts)(kind)
    return found


def head_kind(config: HeadConfig) -> HeadKind:
    """The kind of a head with this configuration."""
    found = weighted(config.kind)
    assert isinstance(found, HeadKind), f"{config.kind} is no kind of heads"
    return found


def head_kinds() -> list[HeadKind]:
    """Every kind of heads, in the order in which they are asked whether a directory is theirs."""
    found = [weighted(kind.name) for kind in kinds() if kind.weights == "head"]
    return [each for each in found if isinstance(each, HeadKind)]


def recognise(files: Files) -> HeadKind | None:
    """The kind of head that a directory holds, None if none knows it."""
    return next((kind for kind in head_kinds() if kind.recognises(files)), None)


def model_free() -> list[Kind]:
    """The kinds without weights, those that a request brings with it included."""
    return [kind for kind in kinds() if kind.weights is None]


def build_model_free(name: str, config: SpeculativeConfig) -> Drafter:
    """The drafter of a kind without weights.

    Raises:
        ConfigError: the distribution that provides it is broken.
    """
    kind = named(name)
    build: Callable[[SpeculativeConfig], Drafter] = kind.load(kind.drafts)
    if kind.source == OURS:
        return build(config)
    advice = f"update or uninstall {kind.source}"
    try:
        made = build(config)
    except SametokenError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"drafter {name!r} of {kind.source} cannot be built ({problem}); {advice}") from error
    if not hasattr(made, "propose"):
        raise ConfigError(f"drafter {name!r} of {kind.source}: {kind.drafts} made {made!r}, not a drafter; {advice}")
    return made


def draft_model() -> Kind:
    """The kind of drafts that are whole models."""
    return next(kind for kind in kinds() if kind.weights == "model")
