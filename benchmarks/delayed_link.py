"""A cable between two hosts (network namespaces) that delays each packet, in user space: for kernels without netem.

    python benchmarks/delayed_link.py PROCESS PROCESS INTERFACE

The processes are one of each host. Each host gets a TAP device INTERFACE. What one sends arrives at the other after a
delay of 0 ms; each line of standard input is a new delay in milliseconds. Ends with standard input.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET, PR_SET_TIMERSLACK = 0x40000000, 29
LARGEST = 1 << 16  # bytes of a packet
LIBC = ctypes.CDLL(None, use_errno=True)


def device(process: int, name: str) -> int:
    """The descriptor of a new TAP device in the network namespace of a process."""
    space = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    if LIBC.setns(space, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network of process {process}; run it as root")
    os.close(space)
    found = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(found, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return found


def forward(ends: tuple[int, int]) -> None:
    """Carries packets between two devices until standard input ends."""
    LIBC.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # the kernel would let it sleep 50 microseconds longer
    delay = 0.0
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # for each device, by time
    other = dict(zip(ends, reversed(ends), strict=True))
    while True:
        nearest = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        seconds = None if nearest is None else max(0.0, nearest - time.monotonic())
        ready, _, _ = select.select([0, *ends], [], [], seconds)
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            delay = float(line) / 1e3
            print("set", flush=True)
        now = time.monotonic()
        for end in ends:
            if end in ready:
                _take(end, waiting[other[end]], now + delay)
        now = time.monotonic()
        for end, queue in waiting.items():
            while queue and queue[0][0] <= now:
                _, packet = queue.popleft()
                with suppress(OSError):  # the device is not up yet, or full: the packet is lost
                    os.write(end, packet)


def _take(end: int, queue: deque[tuple[float, bytes]], release: float) -> None:
    try:
        while True:
            queue.append((release, os.read(end, LARGEST)))
    except BlockingIOError:
        return


def main() -> None:
    first, second, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ends = device(first, name), device(second, name)
    print("made", flush=True)
    forward(ends)


if __name__ == "__main__":
    main()
