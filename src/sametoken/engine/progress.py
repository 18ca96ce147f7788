"""A bar of progress on standard error, where that is a terminal: for `LLM.generate` and for commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def open_progress() -> Progress:
    """One bar per task on standard error, nothing without a terminal; a task's description says what goes on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    off = not sys.stderr.isatty()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=off, redirect_stdout=False)


def counted(steps: Iterable[bool], total: int, what: str) -> Iterator[bool]:
    """The same steps, with a bar of those that are true, `total` in all."""
    with open_progress() as bar:
        task = bar.add_task(what, total=total)
        for done in steps:
            bar.advance(task, done)
            yield done
