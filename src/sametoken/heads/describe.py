"""What config.json and the tensors of a head say it computes, for every kind."""

from __future__ import annotations

from sametoken.errors import CheckpointError, ConfigError
from sametoken.heads.anyhead import Described
from sametoken.heads.eagle.reading import EagleReader
from sametoken.heads.files import Files
from sametoken.heads.medusa.names import medusa_place
from sametoken.heads.medusa.reading import describe_medusa
from sametoken.model.config import ModelConfig


def describe(files: Files, target: ModelConfig) -> Described:
    """What a head computes.

    Raises:
        CheckpointError: config.json lacks a fact or contradicts the tensors.
        UnsupportedModelError: the head is of a kind that is not implemented.
        DraftMismatchError: it was made for another target, or is another kind of head than it says.
    """
    try:
        if any(medusa_place(name) is not None for name in files.seen):
            config, producer, notes = describe_medusa(files, target)
            return Described(config, None, producer, notes)
        return EagleReader(files, target).describe()
    except ConfigError as error:
        raise CheckpointError(f"{files.where}: {error}") from error
