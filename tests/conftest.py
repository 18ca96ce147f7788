"""Fixtures shared by tests that need a model on disk: tiny, random, made once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_checks import Pair, make_pair, speak
from tiny_models import save


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny target and another draft; their tokens are letters."""
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def tiny_llm_dir(tiny_pair: Pair) -> Path:
    """The target of the pair."""
    return Path(tiny_pair.target)


@pytest.fixture(scope="session")
def family_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny target of every kind of attention, each with a tokenizer of letters."""
    root = tmp_path_factory.mktemp("families")
    names = ("llama-3.1", "mistral", "phi-3-short", "qwen-2.5-windows", "qwen-3")
    for name in names:
        save(name, root / name)
        speak(root / name)
    return {name: root / name for name in names}
