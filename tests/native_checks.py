"""Fixtures for what runs in the compiled kernels: every variant that this machine can run, on one thread and on two.

With SAMETOKEN_TEST_ARM set, every variant of arm64 in qemu instead (`make test-arm`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import arm_kernels
from sametoken.errors import ConfigError
from sametoken.kernels.cpu import threads as threads_module
from sametoken.kernels.cpu import variant as native
from sametoken.kernels.cpu.library import Library


def built(name: str) -> Library | None:
    """The variant, if it was built and this machine can run it."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SWITCH, name)
            return native.choose()[0]
    except ConfigError:
        return None


BUILT = [found for found in map(built, native.VARIANTS) if found is not None]
EMULATED = os.environ.get("SAMETOKEN_TEST_ARM") is not None


def use(kernels: Library | None, patch: pytest.MonkeyPatch) -> Library | None:
    """Use these kernels, or none, for everything that is packed, loaded and computed from here on."""
    patch.setattr(native, "_chosen", lambda: (kernels, native.KernelStatus(kernels and kernels.name, ())))
    return kernels


@pytest.fixture(params=arm_kernels.PROCESSORS if EMULATED else [each.name for each in BUILT])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = arm_kernels.load(request.param) if EMULATED else built(request.param)
    assert found is not None
    return use(found, monkeypatch)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(threads_module, "ALONE_BYTES", 0)  # weights this small would never see a second thread
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)
