"""Facts of a rank's own host: cores that it may use, its sockets, and addresses by which ranks reach each other."""

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

SIOCGIFADDR, IFREQ_BYTES = 0x8915, 256  # how Linux is asked for the address of an interface


def own_cores() -> list[Any]:
    """This host's name, and the cores that this process may use; no core where the system does not say."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [socket.gethostname(), cores]


def pin(cores: Sequence[int]) -> None:
    """Restrict all threads of this process, and those that it starts later, to these cores."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, cores)


def shares_cores(own: Sequence[Any], other: Sequence[Any]) -> bool:
    """True if two ranks, see `own_cores`, are on one host and may use a common core."""
    return bool(own[0] == other[0] and (not own[1] or not {*own[1]}.isdisjoint(other[1])))


def reachable(place: RankPlace, seconds: float) -> RankPlace:
    """The place with the first address of rank 0's host that answers. Raises TimeoutError if none does in time."""
    hosts = (place.host, *place.others)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for address in hosts:
            with suppress(OSError), socket.create_connection((address, place.port), 2.0):
                return place._replace(host=address, others=())
        time.sleep(0.2)
    raise TimeoutError(f"{', '.join(hosts)}: no answer")


def own_address(place: RankPlace) -> str:
    """The address of this host in the network that leads to rank 0."""
    family, _, _, _, address = socket.getaddrinfo(place.host, place.port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface of this host that has an IPv4 address; None where the system does not say."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, name.encode().ljust(IFREQ_BYTES, b"\0"))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def own_sockets() -> set[int]:
    """The descriptors of this process's sockets."""
    found = set()
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the directory's own, which is closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.add(number)
    return found


def shut(descriptors: Iterable[int]) -> None:
    """End connections that other code has; sockets that listen are left, where gloo would end the process."""
    for number in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
