"""Terminal output of the commands: tables on standard output, progress on standard error.

Without a terminal rich assumes 80 columns, too few for most tables, so that each table sets its width.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sametoken.engine.progress import open_progress

__all__ = ["ACCEPTED", "open_console", "open_progress", "tell"]

if TYPE_CHECKING:
    from rich.console import Console

ACCEPTED = "bold green"  # style of accepted drafts; bold remains without colours


def tell(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def open_console(width: int, color: bool = True) -> Console:
    """Standard output as a console, with `width` columns if it is no terminal."""
    from rich.console import Console

    columns = None if sys.stdout.isatty() else width
    return Console(file=sys.stdout, width=columns, highlight=False, no_color=not color)
