"""The name `smollm2`: the download of the published file."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_files import gguf, needs_models

from sametoken import embedded
from sametoken.checkpoint import hub, named
from sametoken.files import stamp

pytestmark = needs_models


def test_the_name_stands_for_the_published_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "PATIENCE_S", (60.0, 60.0))
    known = embedded.published("smollm2")
    assert known is not None
    assert stamp(Path(gguf("smollm2"))) == (known.bytes, known.sha256)
    file = named.file_of("smollm2", known, tmp_path, hub._check_space, offline=False)
    assert "Apache License" in (file.parent / "LICENSE").read_text()
    assert "Apache License 2.0. Unchanged, from the Python package" in (file.parent / "NOTICE").read_text()
