"""Fixtures for what runs in the compiled kernels: every variant that this machine can run, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sametoken.errors import ConfigError
from sametoken.model import linear as linear_module
from sametoken.model import native as native_module
from sametoken.native import library as native
from sametoken.native.library import Library


def built(name: str) -> Library | None:
    """The variant, if it was built and this machine can run it."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SWITCH, name)
            return native.choose()[0]
    except ConfigError:
        return None


BUILT = [found for found in map(built, native.VARIANTS) if found is not None]


@pytest.fixture(params=BUILT, ids=lambda each: each.name)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Every decoder that is loaded from here on uses this variant."""
    for module in (linear_module, native_module):
        monkeypatch.setattr(module, "library", lambda: request.param)
    found: Library = request.param
    return found


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(native, "ALONE_BYTES", 0)  # weights this small would never see a second thread
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)
