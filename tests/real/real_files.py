"""Where published models are, for the tests of this folder, which are skipped without them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from real_models import MODELS

REAL = os.environ.get("SAMETOKEN_REAL", "")
needs_models = pytest.mark.skipif(not REAL, reason="needs published models (3.2 GB); run: make test-real")
RECORDED = Path(__file__).with_name("llama_cpp.json")
CACHE_VARIABLE = "SAMETOKEN_WEIGHT_CACHE"


def gguf(name: str) -> str:
    """The file of a published model."""
    return str(Path(REAL) / MODELS[name].file)


def bf16(name: str) -> str:
    """The directory in bfloat16 that was made from it."""
    return str(Path(REAL) / MODELS[name].bf16)


def recorded() -> dict[str, Any]:
    """What llama.cpp said, see `record_llama_cpp.py`."""
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))
