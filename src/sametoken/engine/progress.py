"""Progress bar on standard error, if that is a terminal, for `LLM.generate` and for commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def open_progress() -> Progress:
    """Progress display on standard error, with one bar and description per task; empty without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    off = not sys.stderr.isatty()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=off, redirect_stdout=False)


def counted(steps: Iterable[bool], total: int, what: str) -> Iterator[bool]:
    """Yield `steps`, with a bar that counts the true ones out of `total`."""
    with open_progress() as bar:
        task = bar.add_task(what, total=total)
        for done in steps:
            bar.advance(task, done)
            yield done
