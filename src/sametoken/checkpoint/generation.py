"""Recommended sampling of a model, from its generation_config.json; the keys are those that vLLM reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sametoken.checkpoint.hub import read_json
from sametoken.errors import CheckpointError, RequestError
from sametoken.options.sampling import RECOMMENDED, SamplingParams

FILE = "generation_config.json"


def recommended_sampling(directory: Path) -> dict[str, Any]:
    """Read the sampling parameters that the file states, by name; empty without the file.

    Raises:
        CheckpointError: the file cannot be read, or a value is out of range.
    """
    stated = read_json(directory / FILE) or {}
    found = {key: stated[key] for key in RECOMMENDED if stated.get(key) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        remedy = "correct the file, or leave it out with generation_config none"
        raise CheckpointError(f"{directory / FILE}: {error} ({remedy})") from error
    return found
