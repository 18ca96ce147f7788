"""Loads published model files and puts what came of it into docs/support_published.json, for `make support`.

    python scripts/published_files.py FILE.gguf ...

A file counts as loaded when it goes on with a prompt greedily, and says the same with drafts.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from sametoken import LLM, SamplingParams
from sametoken.checkpoint.hub import read_config, resolve

RECORD = Path(__file__).parents[1] / "docs" / "support_published.json"
PROMPT = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=32)


def loaded(file: Path) -> dict[str, Any]:
    """The record of a file; raises SystemExit where drafts change what it says."""
    drafts = (None, {"method": "suffix"})
    plain, drafted = (LLM(str(file), None, each, max_seq_len=512).generate(PROMPT, GREEDY)[0] for each in drafts)
    if plain.token_ids != drafted.token_ids:
        raise SystemExit(f"{file}: {plain.token_ids} without drafts, {drafted.token_ids} with them; expected the same")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {
        "architecture": read_config(resolve(file))["architectures"][0],
        "sha256": digest,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name in sys.argv[1:]:
        record[Path(name).name] = loaded(Path(name))
        print(f"{name}: loaded")
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")
