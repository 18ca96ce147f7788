"""Kinds of drafters, one record each, from this package and from other installed distributions.

A record is data, so that help texts and checks of names import no torch; implementations are imported on use.
Another distribution adds a kind by an entry point of the group `sametoken.drafters` that names its record.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Literal

from sametoken.errors import ConfigError, unknown_name

LOG = logging.getLogger("sametoken")
GROUP = "sametoken.drafters"
OURS = "sametoken"  # provider of the kinds of this package
RESERVED = ("auto", "none")  # methods that are no kind: all drafters, and no drafter
BUILT_IN = (
    "sametoken.drafters.kinds:FORCED",
    "sametoken.heads.draft_model.kind:KIND",
    "sametoken.heads.eagle1.kind:KIND",
    "sametoken.heads.eagle3.kind:KIND",
    "sametoken.heads.medusa.kind:KIND",
    "sametoken.heads.mtp.kind:KIND",
    "sametoken.drafters.kinds:NGRAM",
    "sametoken.drafters.kinds:SUFFIX",
    "sametoken.drafters.kinds:PREDICTION",
)


# Keys of config.json that mark heads of several kinds: in our own files, and in those of speculators.
HEAD_MARKS = (OURS, "speculators_config", "speculators_model_type")
HEAD_WORDS = ("Speculator",)


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    Attributes:
        name: method name for requests and `--method`.
        title: name in tables, for example "EAGLE-3".
        what: name in a sentence, with its article: "an EAGLE-3 head".
        drafts: reference "module:attribute" to the builder of the drafter: a `heads.kind.HeadKind` for a head, a
            `heads.kind.Weighted` for a model, a function of the `SpeculativeConfig` for a kind without weights.
        weights: "head" for a head on the target, "model" for a separate model, None for a kind without weights.
        comes_with: part of a request that selects this kind; "" for kinds that any request may name.
        objective: reference to a `learning.training.Training`, "" if the kind cannot be trained here.
        marks: keys of config.json that only files of this kind have.
        words: parts of the names of architectures that only files of this kind have.
            A mark or word selects the kind of a draft that is a whole model, if it is not the usual draft model.
        aliases: names elsewhere, by tool: "vllm", "sglang", "trtllm", "llama-server", "speculators"; "trtllm-1.2" and
            "trtllm-1.3" for the PyTorch backend of these versions of TensorRT-LLM; "train" for `sametoken train
            --mode`; "embedded" for drafts that have a name
            (`sametoken.embedded`).
        inside: true if the head is part of its target's checkpoint, so that no draft is given.
        taps: true if the head reads blocks of the target that may be chosen, rather than the last hidden state.
        unasked: default draft length if neither a method, a length nor a draft is given, for kinds whose guesses
            cost next to nothing; 0 for kinds that must be named.
        mixed: true if "auto" includes the kind; False for a kind whose guesses another kind makes too.
        source: distribution that provides the kind, with its version; filled in by the registry.
    """

    name: str
    title: str
    what: str
    drafts: str
    weights: Literal["head", "model"] | None = None
    comes_with: str = ""
    objective: str = ""
    marks: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    inside: bool = False
    taps: bool = False
    unasked: int = 0
    mixed: bool = True
    source: str = OURS

    def load(self, reference: str) -> Any:
        """Import the object that `drafts` or `objective` names.

        Raises:
            ConfigError: it cannot be imported, which only happens to kinds of other distributions.
        """
        if self.source == OURS:
            return _load(reference)
        try:
            return _load(reference)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"drafter {self.name!r} of {self.source} cannot be loaded from {reference}: {error}; "
                f"update or uninstall {self.source}"
            ) from error

    def marked(self, config: Mapping[str, Any]) -> bool:
        """True if a config.json has a mark or an architecture of this kind."""
        return _marked(config, self.marks, self.words)


@cache
def kinds() -> tuple[Kind, ...]:
    """All kinds: those of this package, then those of others in the order of their names."""
    own: list[Kind] = [_load(reference) for reference in BUILT_IN]
    return tuple(own + list(_installed(entry_points(group=GROUP), own)))


def _installed(points: Iterable[EntryPoint], own: Iterable[Kind]) -> Iterator[Kind]:
    """Yield the kinds of other distributions; report and leave out broken ones."""
    taken = {kind.name: kind.source for kind in own}
    for point in sorted(points, key=lambda each: each.name):
        source = "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        try:
            found = point.load()
            reason = _problem(found, taken)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            LOG.warning(f"drafter {point.name!r} of {source} is left out ({point.value}): {reason}")
            continue
        taken[found.name] = source
        yield replace(found, source=source)


def _problem(found: Any, taken: Mapping[str, str]) -> str | None:
    """Error message about a record of another distribution, None if it is correct."""
    if not isinstance(found, Kind):
        return f"it is {found!r}, expected a sametoken.kinds.Kind"
    if not isinstance(found.name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", found.name):
        return f"its name is {found.name!r}, expected lower-case letters, digits, _ and -"
    if found.name in RESERVED:
        return f"its name {found.name!r} means something else, expected another name"
    if found.name in taken:
        return f"its name {found.name!r} is taken by {taken[found.name]}"
    if found.weights not in (None, "head", "model"):
        return f"weights is {found.weights!r}, expected 'head', 'model' or None"
    if not isinstance(found.drafts, str) or not re.fullmatch(r"[\w.]+:\w+", found.drafts):
        return f"drafts is {found.drafts!r}, expected 'module:attribute'"
    for name in ("marks", "words"):
        value = getattr(found, name)
        if not isinstance(value, tuple) or not all(isinstance(each, str) and each for each in value):
            return f"{name} is {value!r}, expected a tuple of texts"
    if not isinstance(found.aliases, Mapping) or not all(isinstance(names, tuple) for names in found.aliases.values()):
        return f"aliases is {found.aliases!r}, expected a tuple of names for each tool"
    if found.objective and not found.aliases.get("train"):
        return "it can be trained but aliases['train'] is missing, expected the names of its mode"
    return None


def named(name: str) -> Kind:
    """Kind of this name.

    Raises:
        ConfigError: there is no such kind.
    """
    known = {kind.name: kind for kind in kinds()}
    if name not in known:
        raise ConfigError(unknown_name("method", name, known))
    return known[name]


def choices() -> tuple[str, ...]:
    """Names that any request may choose."""
    return tuple(kind.name for kind in kinds() if not kind.comes_with)


def inside(method: str | None) -> bool:
    """True if `method` drafts with a part of the target's own checkpoint."""
    return any(kind.inside for kind in kinds() if kind.name == method)


def coming_with(part: str) -> str:
    """Name of the kind that a part of a request selects."""
    return next(kind.name for kind in kinds() if kind.comes_with == part)


def aliases(tool: str) -> dict[str, tuple[str, ...]]:
    """Names of kinds in another tool, each with our names for it, in our order; a name may cover several kinds."""
    found: dict[str, tuple[str, ...]] = {}
    for kind in kinds():
        for alias in kind.aliases.get(tool, ()):
            found[alias] = (*found.get(alias, ()), kind.name)
    return found


def titles() -> str:
    """Enumeration of the kinds of heads in directories of their own: "EAGLE-1, EAGLE-3 or Medusa"."""
    *first, last = [kind.title for kind in kinds() if kind.weights == "head" and not kind.inside]
    return f"{', '.join(first)} or {last}"


def states_head(config: Mapping[str, Any]) -> bool:
    """True if a config.json declares a head; the config.json of a head may also lack such a declaration."""
    heads = (kind for kind in kinds() if kind.weights == "head")
    return _marked(config, HEAD_MARKS, HEAD_WORDS) or any(kind.marked(config) for kind in heads)


def _marked(config: Mapping[str, Any], marks: Iterable[str], words: Iterable[str]) -> bool:
    stated = config.get("architectures")
    names = [str(name) for name in stated] if isinstance(stated, list) else []
    return any(mark in config for mark in marks) or any(word in name for name in names for word in words)


def _load(reference: str) -> Any:
    return EntryPoint("", reference, GROUP).load()
