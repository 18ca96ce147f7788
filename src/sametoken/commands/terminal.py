"""Terminal output of the commands: tables on standard output, progress on standard error.

Rich assumes 80 columns where it finds no terminal, too few for most tables, so each table says its width there.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sametoken.engine.progress import open_progress

__all__ = ["ACCEPTED", "open_console", "open_progress"]

if TYPE_CHECKING:
    from rich.console import Console

ACCEPTED = "bold green"  # the style of accepted drafts; bold remains where colours are off


def open_console(width: int, color: bool = True) -> Console:
    """Standard output, of this many columns where it is no terminal."""
    from rich.console import Console

    columns = None if sys.stdout.isatty() else width
    return Console(file=sys.stdout, width=columns, highlight=False, no_color=not color)
