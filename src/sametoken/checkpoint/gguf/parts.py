"""Files of a model in GGUF: its parts, as llama-gguf-split writes them, and the choice of a file in a Hub repository.

The first part has the metadata of the model; all parts have tensors. Any part may be given for the model. A name such
as "owner/name:Q4_K_M" chooses a file, as in llama.cpp and vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sametoken.errors import CheckpointError, HubError, shown

KIND = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|(?:MX|NV)FP4\w*|BF16|F16|F32))(?:-\d+-of-\d+)?\.gguf$", re.IGNORECASE
)
UNSLOTH = "UD-"  # prefix of Unsloth's types, which may be left out
FIRST_KINDS = ("Q4_K_M", "Q8_0")  # llama.cpp's defaults, in order; then the first file
NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # in names of files that accompany a model
NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
ALL_OF_IT = "put all parts of one model into one directory, with the names that they had"


def siblings(name: str) -> list[str]:
    """Names of all parts of a model, from the name of one; `name` alone if it is not that of a part."""
    found = NAME.fullmatch(name)
    if found is None or not 0 < int(found["number"]) <= int(found["count"]):
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def models(names: Iterable[str]) -> dict[str, list[str]]:
    """Files of each model among `names`, by the name of the first file."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(siblings(name)[0], []).append(name)
    return found


def part_files(file: Path) -> list[Path]:
    """All files of a model, from one of them or from a link to the first.

    Raises:
        CheckpointError: a file is missing.
    """
    link = file.parent / file.readlink() if file.is_symlink() else file
    target = link if NAME.fullmatch(link.name) else file
    files = [target.with_name(name) for name in siblings(target.name)]
    missing = [each.name for each in files if not each.exists()]
    if missing and file.exists():
        words = f"one of {len(files)} parts of a model, of which {len(missing)} are missing: {', '.join(missing[:8])}"
        raise CheckpointError(f"{file}: {words}; {ALL_OF_IT}")
    return files if len(files) > 1 else [file]


def check_parts(files: Sequence[Path], metadata: Sequence[Mapping[str, Any]], tensors: Sequence[Iterable[str]]) -> None:
    """Check that files are the parts of one model, in order.

    Args:
        files: files of the model.
        metadata: metadata of each file.
        tensors: names of the tensors in each file.

    Raises:
        CheckpointError: a file is no part, a part other than in its name, or a part of another model.
    """
    owner: dict[str, Path] = {}
    for i, (file, stated, names) in enumerate(zip(files, metadata, tensors, strict=True)):
        count, number = stated.get(COUNT, 1), stated.get(NUMBER, 0)
        for key, value in ((COUNT, count), (NUMBER, number)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
                raise CheckpointError(f"{file}: {key} is {shown(value)}, expected a number")
        if count > 1 and len(files) == 1:
            words = f"part {number + 1} of {count} of a model, expected a name such as MODEL-00001-of-{count:05}.gguf"
            raise CheckpointError(f"{file}: {words}; {ALL_OF_IT}")
        if len(files) > 1 and (count, number) != (len(files), i):
            words = f"holds part {number + 1} of {count}, its name states part {i + 1} of {len(files)}"
            raise CheckpointError(f"{file}: {words}; {ALL_OF_IT}")
        for name in names:
            if (first := owner.setdefault(name, file)) != file:
                words = f"{shown(name)} is also in {first.name}: parts of different models"
                raise CheckpointError(f"{file}: {words}; {ALL_OF_IT}")
    for file, stated in zip(files, metadata, strict=True):
        expected = stated.get(TENSORS, len(owner))
        if len(files) > 1 and expected != len(owner):
            words = f"its model has {shown(expected)} tensors, the {len(files)} parts together {len(owner)}"
            raise CheckpointError(f"{file}: {words}: parts of different models; {ALL_OF_IT}")


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
