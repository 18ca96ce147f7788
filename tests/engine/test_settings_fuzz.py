"""A short run of `settings_fuzz`: random settings of every option change no token, in this process and served."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from settings_fuzz import Models, check_round, check_served, make_models, missing

SECONDS = float(os.environ.get("SAMETOKEN_FUZZ_SECONDS", "5"))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


def test_every_setting_is_drawn() -> None:
    assert not missing()


def test_random_settings_change_no_token(models: Models) -> None:
    base, until, counts = f"{time.time():.0f}", time.monotonic() + SECONDS, Counter[str]()
    print(f"seeds {base}-0, {base}-1, ..: python tests/settings_fuzz.py --seed {base}-N repeats one")
    for number in range(10_000):
        if time.monotonic() > until and counts["ran"]:
            break
        counts[check_round(models, f"{base}-{number}")] += 1


@pytest.mark.thorough
def test_random_options_of_serve_change_no_token(models: Models) -> None:
    base = f"{time.time():.0f}"
    print(f"seed {base}: python tests/settings_fuzz.py --served --seed {base} repeats it")
    assert check_served(models, base) in ("served", "refused")
