"""Choice of a GGUF file in a Hub repository by a name such as "owner/name:Q4_K_M", as in llama.cpp and vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sametoken.checkpoint.gguf.parts import models, siblings
from sametoken.errors import HubError

KIND = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|(?:MX|NV)FP4\w*|BF16|F16|F32))(?:-\d+-of-\d+)?\.gguf$", re.IGNORECASE
)
UNSLOTH = "UD-"  # prefix of Unsloth's types, which may be left out
FIRST_KINDS = ("Q4_K_M", "Q8_0")  # llama.cpp's defaults, in order; then the first file
NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # in names of files that accompany a model


def chosen_files(repository: str, kind: str, names: Iterable[str]) -> list[str]:
    """File that `kind` names, or all its parts in order.

    Args:
        repository: Hub id, for errors.
        kind: quantisation type ("Q4_K_M", in any case), or the name of a file; "" for the usual type.
        names: files of the repository.

    Raises:
        HubError: no file or several files match, or parts of a file are missing.
    """
    parts = models(name for name in names if is_model(name))
    files = {name: kind_of(name) for name in parts}
    found = _named(files, kind) if kind else _usual(files)
    if not found:
        there = ", ".join(sorted(set(files.values()))) or "no GGUF files"
        raise HubError(f"{repository} has no file for {kind!r}, it has {there}; name one of them after the colon")
    if len(found) > 1:
        raise HubError(
            f"{repository} holds {len(found)} files for {kind!r} ({', '.join(found)}); name one of them after the colon"
        )
    if missing := [name for name in siblings(found[0]) if name not in parts[found[0]]]:
        raise HubError(f"{repository} has only parts of {found[0]}: {', '.join(missing[:8])} not; name another file")
    return parts[found[0]]


def _named(files: dict[str, str], kind: str) -> list[str]:
    """Models of a quantisation type, or the model with a file of this name."""
    for name in files:
        if kind in (name, name.rpartition("/")[2]) or kind in {*siblings(name), *siblings(name.rpartition("/")[2])}:
            return [name]
    exact = [name for name, of in files.items() if of == kind.upper()]
    return exact or [name for name, of in files.items() if of == UNSLOTH + kind.upper()]


def _usual(files: dict[str, str]) -> list[str]:
    return next((found for kind in FIRST_KINDS if (found := _named(files, kind))), list(files))[:1]


def is_model(name: str) -> bool:
    """True if the name of a file is that of a model in GGUF."""
    name = name.rpartition("/")[2].lower()
    return name.endswith(".gguf") and not any(other in name for other in NO_MODELS)


def kind_of(name: str) -> str:
    """Quantisation type in the name of a file, in capitals; "" if it has none."""
    return found[1].upper() if (found := KIND.search(name)) else ""
