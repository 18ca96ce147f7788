"""One cache of packed weights for the tests of this folder, empty at first: the user's own is left as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_files import CACHE_VARIABLE

from sametoken.checkpoint import weight_cache


@pytest.fixture(scope="session", autouse=True)
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of packed weights."""
    place = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(place))
        yield place
        weight_cache.finish()
