"""State of a run of `sametoken draft`: settings, plan and results of finished stages, in one file of its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sametoken.errors import ConfigError, DataError
from sametoken.files import read_object, write_json

FILE = "draft.json"
FORMAT = 1


class DraftState:
    """State of the run in a directory.

    Args:
        out: directory, which this process has locked.
        settings: JSON values that decide the results; they must be those that the run was begun with.

    Attributes:
        content: `rates`, `plan`, `budget_s`, `planned_s`, `chosen` and `spent_s`, as they become known.
        results: JSON of each finished stage; None for one that was left out.

    Raises:
        ConfigError: the directory has a run with other settings, or other files.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self._file = out / FILE
        if self._file.exists():
            self.content = self._read(settings)
        elif any(out.iterdir()):
            raise ConfigError(
                f"--output-dir {out} has files but no {FILE} of an earlier `sametoken draft`; choose another directory"
            )
        else:
            self.content = {"format": FORMAT, "settings": settings, "results": {}}
            self.note(0.0)
        self.results: dict[str, Any] = self.content["results"]

    def _read(self, settings: dict[str, Any]) -> dict[str, Any]:
        content = read_object(self._file)
        if content.get("format") != FORMAT or not isinstance(content.get("settings"), dict):
            raise DataError(f"{self._file}: not the state of a run of this version; choose another --output-dir")
        begun = content["settings"]
        for name in sorted(settings.keys() | begun.keys()):
            self._compare(name, begun.get(name), settings.get(name))
        return content

    def _compare(self, name: str, before: Any, now: Any) -> None:
        if before != now:
            raise ConfigError(
                f"{self._file.parent} was begun with {name} = {json.dumps(before)}, now it is {json.dumps(now)}; go on "
                "with the same, or choose another --output-dir"
            )

    def check_budget(self, seconds: float) -> None:
        """Raise ConfigError if a plan was made for another budget."""
        if "plan" in self.content:
            self._compare("budget in seconds", self.content["budget_s"], seconds)

    def note(self, spent_s: float, **found: Any) -> None:
        """Write new content, and the seconds that the run took so far."""
        self.content |= found | {"spent_s": spent_s}
        write_json(self._file, self.content)

    def finish(self, stage: str, record: dict[str, Any] | None, spent_s: float) -> None:
        """Write the result of a stage."""
        self.results[stage] = record
        self.note(spent_s)
