"""Collectives over the network: broadcasts of rank 0, sums in the order of the ranks, and gathered columns of logits.

The transport is torch.distributed (gloo). A call that fails or waits for a lost rank raises RuntimeError.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from sametoken.errors import SametokenError
from sametoken.parallel.host import own_address, own_sockets, shut
from sametoken.parallel.place import RankPlace
from sametoken.runtime.ranks import NativeExchange

DIST: Any = torch.distributed  # some of its types are incomplete
JOIN_S = 10.0  # until the connections are open
FOREVER = timedelta(days=365)  # of a collective; a hanging rank is detected by its heartbeats
FAILED: list[object] = []  # connections that never opened; their deletion would wait for the other ranks
INTERFACES = "GLOO_SOCKET_IFNAME"  # interfaces, separated by commas, for torch.distributed


class Transport(Protocol):
    """Protocol of the transport between the ranks of one target."""

    @property
    def native(self) -> NativeExchange | None:
        """Collectives for compiled code, None if there are none."""
        ...

    def send(self, data: Tensor) -> None:
        """Broadcast the bytes of rank 0 to all ranks."""
        ...

    def sum(self, partial: Tensor) -> None:
        """All-reduce: replace contiguous float32 numbers by their sums over all ranks, in the order of the ranks."""
        ...

    def gather(self, own: Tensor, begins: Sequence[int], *, everywhere: bool) -> Tensor:
        """Gather the columns [R, begins[rank + 1] - begins[rank]] of all ranks as [R, begins[-1]] on rank 0.

        Args:
            everywhere: return the result on the other ranks too.
        """
        ...

    def stop(self, *, hangs: bool) -> None:
        """Abort calls of other threads, since a rank is lost. `hangs`: the connections of this rank are still open."""
        ...


class Gloo:
    """Transport over gloo connections to all other ranks.

    Raises:
        SametokenError: the connections were not opened in time.
    """

    native: NativeExchange | None = None

    def __init__(self, place: RankPlace, store: Any) -> None:
        self._place, before = place, own_sockets()
        gloo, options = DIST.ProcessGroupGloo, DIST.ProcessGroupGloo._Options()
        interfaces = [each for each in os.environ.get(INTERFACES, "").split(",") if each]
        try:
            options._devices = [gloo.create_device(interface=each) for each in interfaces] or [
                gloo.create_device(hostname=own_address(place))
            ]
            options._timeout = timedelta(seconds=JOIN_S)
            self._gloo = gloo(DIST.PrefixStore("gloo", store), place.rank, place.size, options)
            self.all(torch.zeros(1))
        except RuntimeError as error:
            FAILED.append(self)
            own = f"{INTERFACES}={','.join(interfaces)}" if interfaces else f"the address {own_address(place)}"
            here = ", ".join(name for _, name in socket.if_nameindex())
            raise SametokenError(
                f"rank {place.rank} does not reach the other ranks by {own} ({first_line(error)}); set {INTERFACES} "
                f"on each host to the interface that joins the hosts; this host has {here}"
            ) from error
        self._links = own_sockets() - before
        self._gloo.set_timeout(FOREVER)

    def send(self, data: Tensor) -> None:
        """Implement `Transport.send`."""
        self._gloo.broadcast([data]).wait()

    def all(self, own: Tensor) -> Tensor:
        """All-gather `own` as [ranks, ...]."""
        parts = own.new_empty(self._place.size, *own.shape)
        self._gloo.allgather([list(parts.unbind())], [own]).wait()
        return parts

    def sum(self, partial: Tensor) -> None:
        """Implement `Transport.sum`."""
        parts = self.all(partial)
        torch.add(parts[0], parts[1], out=partial)
        for part in parts[2:]:
            partial += part

    def gather(self, own: Tensor, begins: Sequence[int], *, everywhere: bool) -> Tensor:
        """Implement `Transport.gather`."""
        rank, size, options = self._place.rank, self._place.size, DIST.GatherOptions()
        widths = [end - begin for begin, end in pairwise(begins)]
        padded = own.new_empty(own.shape[0], max(widths))
        padded[:, : widths[rank]] = own
        if everywhere:
            parts = list(self.all(padded).unbind())
        else:
            parts = [torch.empty_like(padded) for _ in range(size)] if rank == 0 else []
            self._gloo.gather([parts] if rank == 0 else [], [padded], options).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1) if parts else own

    def stop(self, *, hangs: bool) -> None:
        """Abort calls, see `Transport`; a collective does not end by itself while the connection is open."""
        if hangs:
            shut(self._links)


def first_line(error: Exception) -> str:
    """First line of torch's error message, without source positions and advice for developers."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0]
