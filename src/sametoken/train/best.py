"""Best head in the directory of a run, with its acceptance length, so that no worse head replaces it.

The record has the digest of the evaluated files. If a kill between writing files and record leaves them inconsistent,
the head is evaluated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sametoken.checkpoint.paths import user_path
from sametoken.errors import DataError
from sametoken.files import read_object, stamp, write_json
from sametoken.train.settings import KeepSettings

RECORD = "best.json"


def evaluated_by(keep: KeepSettings) -> dict[str, Any]:
    """Conditions of an evaluation other than the head: prompts, answer tokens and draft length."""
    assert keep.eval_data is not None
    file = user_path(keep.eval_data)
    return {
        "eval_data": stamp(file).sha256 if file.is_file() else keep.eval_data,
        "eval_prompts": keep.eval_prompts, "eval_tokens": keep.eval_tokens, "max_draft_len": keep.max_draft_len,
    }  # fmt: skip


class Best:
    """Best head in `place`, for use by the main process alone.

    Attributes:
        place: directory of the head, which may not exist yet.
        acceptance: acceptance length, None if the head was not evaluated.
    """

    def __init__(self, place: Path) -> None:
        self.place, self._record = place, place.parent / RECORD
        self._conditions: Mapping[str, Any] = {}
        self.acceptance = self._recorded()

    def comparable(self, conditions: Mapping[str, Any]) -> bool:
        """True if an evaluation under these conditions is comparable with the best head's, or there is no head."""
        return not self.place.exists() or (self.acceptance is not None and self._conditions == conditions)

    def note(self, acceptance: float, conditions: Mapping[str, Any]) -> None:
        """Record the acceptance length of the head in `place`."""
        self.acceptance, self._conditions = acceptance, dict(conditions)
        content = {"acceptance": acceptance, "judged_by": self._conditions, "sha256": self._digest()}
        write_json(self._record, content)

    def offer(self, acceptance: float, conditions: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        """Call `write` to replace the head in `place` if the acceptance length is greater; they must be comparable."""
        if self.acceptance is None or acceptance > self.acceptance:
            write(self.place)
            self.note(acceptance, conditions)

    def _recorded(self) -> float | None:
        try:
            found = read_object(self._record)
            acceptance, conditions, digest = (found[name] for name in ("acceptance", "judged_by", "sha256"))
            if isinstance(acceptance, float) and isinstance(conditions, dict) and digest == self._digest():
                self._conditions = conditions
                return acceptance
        except (DataError, KeyError, OSError):
            pass  # evaluated again
        return None

    def _digest(self) -> str:
        return stamp(*sorted(file for file in self.place.iterdir() if file.is_file())).sha256
