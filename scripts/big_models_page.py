"""Renews what `sametoken doctor` prints in docs/big-models.md: `make big-models`.

The models' directories have config.json and an index and no weights; the tests write them (`tests/big_models.py`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "big-models.md"
BLOCK = re.compile(r"```console\n\$ sametoken (doctor [^\n]*)\n.*?```", re.S)


def renewed(page: str, run: Callable[[list[str]], str]) -> str:
    """The page with the output of each command, which `run` gives for its words."""

    def block(match: re.Match[str]) -> str:
        return f"```console\n$ sametoken {match[1]}\n{run(shlex.split(match[1])).strip()}\n```"

    return BLOCK.sub(block, page)


def printed(words: list[str]) -> str:
    """What the command of these words prints."""
    from sametoken.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main(words)
    return output.getvalue()


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1] / "tests"))
    import big_models

    with tempfile.TemporaryDirectory() as place:
        big_models.write_all(Path(place))
        os.chdir(place)
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), printed), encoding="utf-8")
