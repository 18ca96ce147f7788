"""The best head of a run's directory and its acceptance length, so that no worse head replaces it.

The record names the evaluated files by their digest. After a kill between writing files and record they do not fit each
other, and the head is evaluated again.
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
    """Conditions of an acceptance length besides the head: evaluation prompts, answer tokens and draft length."""
    assert keep.eval_data is not None
    file = user_path(keep.eval_data)
    return {
        "eval_data": stamp(file).sha256 if file.is_file() else keep.eval_data,
        "eval_prompts": keep.eval_prompts, "eval_tokens": keep.eval_tokens, "max_draft_len": keep.max_draft_len,
    }  # fmt: skip


class Best:
    """The head in `place`, to be used by the main process alone.

    Attributes:
        place: its directory; perhaps there is none yet.
        acceptance: its acceptance length, None if it was not evaluated.
    """

    def __init__(self, place: Path) -> None:
        self.place, self._record = place, place.parent / RECORD
        self._conditions: Mapping[str, Any] = {}
        self.acceptance = self._recorded()

    def comparable(self, conditions: Mapping[str, Any]) -> bool:
        """True if an evaluation under these conditions can be compared with the kept head's, or if no head is kept."""
        return not self.place.exists() or (self.acceptance is not None and self._conditions == conditions)

    def note(self, acceptance: float, conditions: Mapping[str, Any]) -> None:
        """Write down the acceptance length of the head in place."""
        self.acceptance, self._conditions = acceptance, dict(conditions)
        content = {"acceptance": acceptance, "judged_by": self._conditions, "sha256": self._digest()}
        write_json(self._record, content)

    def offer(self, acceptance: float, conditions: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        """Have a head written if it is better than the one in place, which is comparable."""
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
            pass  # evaluated anew
        return None

    def _digest(self) -> str:
        return stamp(*sorted(file for file in self.place.iterdir() if file.is_file())).sha256
