"""The soak in small: many clients at once get what each would get alone, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"


@pytest.mark.thorough
def test_clients_that_crowd_and_leave_change_nothing() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.05", "--clients", "8", "--kinds", "25"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("every answer as alone; nothing leaked\n")
    assert '"left": ' in ended.stdout  # some did leave
