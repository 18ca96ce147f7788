"""Which GGUF file of a Hub repository a name such as "owner/name:Q4_K_M" means, as llama.cpp and vLLM spell it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sametoken.errors import HubError

KIND = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32))(?:-\d+-of-\d+)?\.gguf$", re.IGNORECASE)
SPLIT_PART = re.compile(r"-\d+-of-\d+\.gguf$", re.IGNORECASE)


def chosen_file(repository: str, kind: str, names: Iterable[str]) -> str:
    """The one file that `kind` names.

    Args:
        kind: how the blocks are stored ("Q4_K_M", in any case), or the name of a file.
        names: the files of the repository.

    Raises:
        HubError: no file, several files, or a file in several parts.
    """
    files = kinds_of(names)
    found = [name for name, of in files.items() if kind in (name, name.rpartition("/")[2]) or of == kind.upper()]
    if not found:
        there = ", ".join(sorted(set(files.values()))) or "no GGUF files"
        raise HubError(f"{repository} has no file for {kind!r}, it has {there}; name one of them after the colon")
    if any(SPLIT_PART.search(name) for name in found):
        raise HubError(
            f"{repository} holds {kind} in {len(found)} parts; download them, join them with "
            "`llama-gguf-split --merge`, and give the path of the joined file"
        )
    if len(found) > 1:
        raise HubError(
            f"{repository} holds {len(found)} files for {kind!r} ({', '.join(found)}); name one of them after the colon"
        )
    return found[0]


def kinds_of(names: Iterable[str]) -> dict[str, str]:
    """The GGUF files that hold a model, with the kind of their blocks in capitals ("" where the name states none)."""
    files = [name for name in names if name.lower().endswith(".gguf")]
    models = [name for name in files if not name.rpartition("/")[2].lower().startswith(("mmproj", "imatrix"))]
    return {name: found[1].upper() if (found := KIND.search(name)) else "" for name in models}
