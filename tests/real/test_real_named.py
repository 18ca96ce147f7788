"""The names `smollm2` and `smollm2-eagle3`: the download of the published file, and our head on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_files import gguf, needs_models

from sametoken import LLM, SamplingParams, embedded
from sametoken.checkpoint import hub, named
from sametoken.commands.demo import PROMPTS
from sametoken.files import stamp

pytestmark = needs_models
HEAD = Path(embedded.draft(embedded.SMOLLM2_HEAD))


def test_the_name_stands_for_the_published_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "PATIENCE_S", (60.0, 60.0))
    known = embedded.published("smollm2")
    assert known is not None
    assert stamp(Path(gguf("smollm2"))) == (known.bytes, known.sha256)
    file = named.file_of("smollm2", known, tmp_path, hub._check_space, offline=False)
    assert "Apache License" in (file.parent / "LICENSE").read_text()
    assert "Apache License 2.0. Unchanged, from the Python package" in (file.parent / "NOTICE").read_text()


@pytest.mark.skipif(not HEAD.exists(), reason="the head is not part of this tree")
def test_the_head_guesses_well_and_changes_no_token() -> None:
    talks = [[{"role": "user", "content": text}] for text in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=64)
    drafted = LLM(gguf("smollm2"), "smollm2-eagle3", {"max_draft_len": 4, "adaptive": False}).chat(talks, params)
    plain = LLM(gguf("smollm2"), speculative={"method": "none"}).chat(talks, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    tokens, forwards = (
        sum(getattr(each.speculation, name) for each in drafted) for name in ("emitted", "target_forwards")
    )
    assert tokens / forwards > 1.5
