"""Heads that fit a target: those on this machine, by their files, and published ones, by the name of the target.

Only config.json and the headers of weight files are read; files are not downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sametoken import kinds
from sametoken.checkpoint.contents import trained_part
from sametoken.checkpoint.hub import cache_directory, read_config
from sametoken.errors import SametokenError
from sametoken.heads.files import Files
from sametoken.heads.read import describe, is_head
from sametoken.heads.registry import head_kind
from sametoken.model.config import ModelConfig

# Drafts of NVIDIA's playbooks and of Dynamo's examples: kind, and prefixes of the names of the targets without owners.
PUBLISHED = {
    "nvidia/gpt-oss-120b-Eagle3-long-context": ("EAGLE-3", ("gpt-oss-120b",)),
    "nvidia/Qwen3-235B-A22B-Eagle3": ("EAGLE-3", ("Qwen3-235B-A22B",)),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": ("EAGLE-3", ("Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B-Instruct")),
    "nvidia/Llama-3.1-8B-Instruct-FP4": ("draft model", ("Llama-3.3-70B-Instruct",)),
}


@dataclass(frozen=True)
class FittingHead:
    """A head for a target.

    Attributes:
        name: directory or Hub id.
        kind: title of the kind.
        found: "files" if its files were compared with the target, "published" if only the name of the target was.
        words: further description.
    """

    name: str
    kind: str
    found: str
    words: str


def fitting_heads(target: Path, name: str, folders: Iterable[Path] = ()) -> list[FittingHead]:
    """Heads for a target: the one in its own files, those on this machine, and published ones.

    Args:
        target: directory of the target; only its config.json is read.
        name: Hub id or path of the target.
        folders: heads, training runs, and directories of them.
    """
    shape = ModelConfig.from_hf(read_config(target))
    places = dict.fromkeys(place.resolve() for place in (*_given(folders), *_cached()))
    local = [found for place in places if (found := _fitting(place, shape)) is not None]
    return [*_inside(target, shape), *local, *_published(name)]


def _inside(target: Path, shape: ModelConfig) -> Iterator[FittingHead]:
    """Head inside the files of the target, as far as they are there."""
    for kind in kinds.kinds() if shape.further_layers else ():
        if kind.inside:
            with suppress(SametokenError):
                describe(Files.of(target), shape, kind.name)
                yield FittingHead(str(target), kind.title, "files", f"part of the target; use --method {kind.name}")


def _given(folders: Iterable[Path]) -> Iterator[Path]:
    """Folders and their direct subfolders; for a training run, its head."""
    for folder in folders:
        for place in (folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())):
            if place.is_dir():
                yield trained_part(place) or place


def _cached() -> Iterator[Path]:
    """Snapshots in the Hub's cache with a config.json."""
    for file in sorted(cache_directory().glob("models--*/snapshots/*/config.json")):
        yield file.parent


def _fitting(place: Path, shape: ModelConfig) -> FittingHead | None:
    """Head in a directory; None if there is none, if it is damaged, or if it fits another target."""
    try:
        if not (place / "config.json").is_file() or not is_head(place):
            return None
        found = describe(Files.of(place), shape)
    except SametokenError:
        return None
    return FittingHead(str(place), head_kind(found.config).title(found.config), "files", found.producer)


def _published(name: str) -> list[FittingHead]:
    last = Path(name).name.partition(":")[0].lower()
    return [
        FittingHead(head, kind, "published", f"published for {target}; not verified here")
        for head, (kind, targets) in PUBLISHED.items()
        for target in targets
        if last.startswith(target.lower()) and last != Path(head).name.lower()
    ]
