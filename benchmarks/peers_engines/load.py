"""Who used the processors and how much memory is free, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """CPU seconds so far: of the whole machine (time stolen by the hypervisor included), and of one session."""

    machine: float
    session: float

    def foreign_since(self, before: Usage) -> float:
        """CPU seconds that others used since then."""
        return max(0.0, (self.machine - before.machine) - (self.session - before.session))


def machine_seconds(stat: str) -> float:
    """Busy CPU seconds from the text of /proc/stat: everything but idle and waiting for a disk."""
    # user nice system idle iowait irq softirq steal; guest times are within user already.
    ticks = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS


def process_seconds(stat: str, session: int) -> float:
    """CPU seconds of a process and its ended children from its /proc/PID/stat, 0 if it is of another session."""
    fields = stat.rpartition(")")[2].split()  # the command's name may hold spaces
    return sum(int(field) for field in fields[11:15]) / TICKS if int(fields[3]) == session else 0.0


def usage(session: int) -> Usage:
    """What was used until now; `session` is the process id of the session's leader."""
    used = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            used += process_seconds(path.read_text(), session)
        except (FileNotFoundError, ProcessLookupError):  # it ended between the listing and the reading
            continue
    return Usage(machine_seconds(Path("/proc/stat").read_text()), used)


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
