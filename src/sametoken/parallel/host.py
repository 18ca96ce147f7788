"""Host of a rank: usable cores, open sockets, and addresses for connections between ranks."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from sametoken.parallel.place import RankPlace

SIOCGIFADDR, IFREQ_BYTES = 0x8915, 256  # ioctl of Linux for the address of an interface


def own_cores() -> list[Any]:
    """Name of this host, and the cores that this process may use; no cores if the system does not report them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [socket.gethostname(), cores]


def pin(cores: Sequence[int]) -> None:
    """Restrict all current and future threads of this process to these cores."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(thread, cores)


def shares_cores(own: Sequence[Any], other: Sequence[Any]) -> bool:
    """True if two ranks, see `own_cores`, are on one host and may use a common core."""
    return bool(own[0] == other[0] and (not own[1] or not {*own[1]}.isdisjoint(other[1])))


def reachable(place: RankPlace, seconds: float) -> RankPlace:
    """Place with the first reachable address of rank 0's host. Raises TimeoutError if none answers in time."""
    hosts = (place.host, *place.others)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for address in hosts:
            with suppress(OSError), socket.create_connection((address, place.port), 2.0):
                return place._replace(host=address, others=())
        time.sleep(0.2)
    raise TimeoutError(f"{', '.join(hosts)}: no answer")


def own_address(place: RankPlace) -> str:
    """Address of this host in the network of rank 0."""
    family, _, _, _, address = socket.getaddrinfo(place.host, place.port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Interface of this host with this IPv4 address; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without address
                found = fcntl.ioctl(probe, SIOCGIFADDR, name.encode().ljust(IFREQ_BYTES, b"\0"))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def own_sockets() -> set[int]:
    """Descriptors of the sockets of this process."""
    found = set()
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # descriptor of the directory itself, closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.add(number)
    return found


def shut(descriptors: Iterable[int]) -> None:
    """Shut down connections of other code; listening sockets are left, since gloo would end the process."""
    for number in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
