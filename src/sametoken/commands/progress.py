"""A bar on stderr for what takes long: how much is done and when the rest will be; nothing where no terminal is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def open_progress() -> Progress:
    """A bar per task, to be entered; a task's description says what goes on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
