"""Data parallelism: the processes that share a step, the wrapper of the trained module, sums, and whole states.

Replicated drafts use torch's DistributedDataParallel; sharded ones use fully_shard on the whole draft at once. A
process that fails publishes its error; a process that is killed or hangs stops sending heartbeats. In both cases the
others end within seconds, with an error that names the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from sametoken.errors import CheckpointError, ConfigError, EngineError, SametokenError
from sametoken.parallel.gloo import FOREVER, INTERFACES
from sametoken.parallel.group import RankGroup
from sametoken.parallel.host import interface_of, own_address
from sametoken.parallel.place import RankPlace, place_of, started

LOOKS_S = 0.25  # polling interval
FOUND_S = 9.0  # time limit to find the reason of a failed collective; longer than the timeout of heartbeats
RAISES_S = 2.0  # time for a computation to end by itself after another process has ended
LEAVES_S = 5.0  # time that rank 0, which may host the store, waits for the others to read its error
ENDED, LEARNED = "ended", "learned"
WHOLE = StateDictOptions(full_state_dict=True)
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # of mallopt


class Processes:
    """Processes started by torchrun, accelerate or mpirun; initialises torch.distributed.

    Args:
        place: place of this process.
        device: device of this process.
        alike: values that must be equal in all processes, by a name for error messages.

    Raises:
        SametokenError: a process did not connect in time, or cannot be reached.
        ConfigError: the processes have different values.
    """

    def __init__(self, place: RankPlace, device: torch.device, alike: Mapping[str, str]) -> None:
        versions = {"sametoken": version("sametoken"), "torch": torch.__version__, "device": device.type}
        self.place, self._group = place, RankGroup(place, {**versions, **alike})
        self._group.connect()
        self._ending = threading.Event()
        self._group.on_failure = lambda error: self._end(_named(error))
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        if INTERFACES not in os.environ and (name := interface_of(own_address(self._group.place))):
            os.environ[INTERFACES] = name  # torch.distributed would choose the interface of the host's name
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        torch.distributed.init_process_group(
            backend, store=self._group.store("run"), rank=place.rank, world_size=place.size, timeout=FOREVER
        )

    def require_equal(self, name: str, value: str) -> None:
        """Raise ConfigError in every process unless all pass the same value."""
        found: list[str] = [""] * self.place.size
        torch.distributed.all_gather_object(found, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ConfigError(f"rank {rank} has {name} {other} and rank 0 has {found[0]}; give all ranks the same")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of collective work; an error in one process ends the others.

        Raises:
            SametokenError: another process has ended; the message includes its error.
        """
        try:
            yield
        except BaseException as error:
            self._ending.set()
            failed = isinstance(error, RuntimeError)  # raised by failed collectives
            words = self._found() if failed else None
            self._tell(LEARNED if words else ENDED, str(error) or type(error).__name__)
            self._leave()
            if words:
                raise SametokenError(words) from error
            raise
        torch.distributed.barrier()
        self._ending.set()
        torch.distributed.destroy_process_group()
        self._leave()

    def _found(self) -> str | None:
        """Message about the process that has ended, found within a time limit; None if none has ended."""
        end = time.monotonic() + FOUND_S
        while (words := self._gone()) is None and time.monotonic() < end:
            time.sleep(LOOKS_S)
        return words

    def _gone(self) -> str | None:
        """Message about a process that has ended, None if none is known; a lost store counts as an ended process."""
        if self._group.failure is not None:
            return _named(self._group.failure)
        try:
            for rank, reason in self._group.published(ENDED).items():
                if rank != self.place.rank:
                    return f"rank {rank} of {self.place.size} has ended: {reason}"
        except EngineError as error:
            return _named(error)
        return None

    def _watch(self) -> None:
        """Poll for messages of ended processes."""
        while not self._ending.wait(LOOKS_S):
            if (words := self._gone()) is not None:
                self._end(words, awaited=self._group.failure is None)

    def _end(self, words: str, *, awaited: bool = False) -> None:
        """End this process, whose computation waits for an ended one; `awaited`: acknowledge its message first."""
        if self._ending.wait(RAISES_S):
            return
        print(f"error: {words}", file=sys.stderr, flush=True)
        if awaited:
            self._tell(LEARNED, words)
        os._exit(2)  # the exit code of errors

    def _tell(self, key: str, words: str) -> None:
        with suppress(RuntimeError):  # the store is lost
            self._group.publish(key, words)

    def _leave(self) -> None:
        """Close the connections; on rank 0 after a limited wait for the others to read an error."""
        self._watcher.join()
        end = time.monotonic() + LEAVES_S
        with suppress(SametokenError):
            while self.place.rank == 0 and time.monotonic() < end and self._group.published(ENDED):
                if len({*self._group.published(ENDED), *self._group.published(LEARNED)}) == self.place.size:
                    break
                time.sleep(LOOKS_S)
        self._group.close()


def _named(error: Exception) -> str:
    return f"{error}; its own messages say why"


class Parallel:
    """Processes of a run.

    Args:
        device: device of this process, or "auto".
        fsdp: shard the draft instead of replicating it.
        fsdp_target: shard the target too.
        alike: values that must be equal in all processes, by a name for error messages.

    Attributes:
        rank: rank of this process.
        count: number of processes.
        main: true for the process that writes and evaluates.
        first_here: true for the first process of a host.
        in_step: true if all processes must make the same number of forwards, since each gathers weights.

    Raises:
        ConfigError: there is no such device, or the processes have different settings.
        SametokenError: a process did not connect in time.
    """

    def __init__(
        self, device: str, fsdp: bool = False, fsdp_target: bool = False, alike: Mapping[str, str] = {}
    ) -> None:
        cpu = device == "cpu" or not torch.cuda.is_available()
        if device.startswith("cuda") and cpu:
            raise ConfigError(f"device {device!r}: this machine or this build of torch has no CUDA; use 'cpu'")
        place = place_of(os.environ, started(os.environ))
        self.rank, self.count, self._fsdp = place.rank, place.size, fsdp and place.size > 1
        self.main, self.first_here = place.rank == 0, place.rank % place.here == 0
        self.in_step = self.count > 1 and (fsdp or fsdp_target)
        self.device = torch.device("cpu") if cpu else torch.device("cuda", place.rank % place.here)
        if self.device.type == "cpu" and not fsdp_target:  # whose gathered blocks are freed after use
            _keep_memory()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._processes = Processes(place, self.device, alike) if self.count > 1 else None

    def together(self) -> AbstractContextManager[None]:
        """Context of collective work; an error in one process ends all."""
        return nullcontext() if self._processes is None else self._processes.together()

    def require_equal(self, name: str, value: str) -> None:
        """Raise ConfigError in every process unless all pass the same value."""
        if self._processes is not None:
            self._processes.require_equal(name, value)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """One-dimensional mesh of all processes, over which weights are sharded."""
        return init_device_mesh(self.device.type, (self.count,))

    def wrap(self, module: nn.Module) -> nn.Module:
        """Module to call instead of `module`, whose parameters may be replaced by other objects."""
        if self.count == 1:
            return module
        if self._fsdp:
            for tensor in module.state_dict().values():  # like DistributedDataParallel
                torch.distributed.broadcast(tensor, 0)
            fully_shard(module, mesh=self.mesh)
            return module
        return nn.parallel.DistributedDataParallel(module)

    def waiting(self, module: nn.Module, wait: bool) -> AbstractContextManager[Any]:
        """Context in which, if `wait`, backward does not exchange gradients, because another backward follows."""
        if self.count == 1 or not wait or self._fsdp:
            return nullcontext()
        return module.no_sync()  # type: ignore[no-any-return,operator]

    def clip(self, module: nn.Module, norm: float) -> float:
        """Clip the gradients to a total norm; return the norm before."""
        found = torch.nn.utils.clip_grad_norm_(module.parameters(), norm)
        return float(found.full_tensor() if hasattr(found, "full_tensor") else found)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the processes."""
        if self.count > 1:
            torch.distributed.all_reduce(values)
        return values

    def most(self, number: int) -> int:
        """Maximum over the processes."""
        found = torch.tensor(number)
        if self.count > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return int(found)

    def agreed(self, value: Any) -> Any:
        """Value of the main process, in all processes."""
        said = [value]
        if self.count > 1:
            torch.distributed.broadcast_object_list(said)
        return said[0]

    def sent(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the main process, on the CPU, in all processes."""
        kinds = self.agreed({name: (each.shape, each.dtype) for name, each in tensors.items()})
        found = {
            name: tensors[name] if self.main else torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in kinds.items()
        }
        for each in found.values() if self.count > 1 else ():
            torch.distributed.broadcast(each, 0)
        return found


def whole_states(
    module: nn.Module, optimisers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole weights by name and optimiser moments by "name/kind", on the CPU; call in every process."""
    weights: Mapping[str, Any] = get_model_state_dict(module, options=WHOLE)
    states: Any = get_optimizer_state_dict(module, optimisers, options=WHOLE)["state"]
    moments = {f"{name}/{kind}": value.cpu() for name, kinds in states.items() for kind, value in kinds.items()}
    return {name: value.cpu().contiguous() for name, value in weights.items()}, moments


def restore(
    module: nn.Module,
    optimisers: Sequence[torch.optim.Optimizer],
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> None:
    """Load whole states, for any number of processes.

    Raises:
        CheckpointError: the states do not fit the module; raised in all processes, before any change.
    """
    found: dict[str, Any] = get_optimizer_state_dict(module, optimisers, options=WHOLE)
    states: dict[str, Any] = {}
    for key, value in moments.items():
        name, _, kind = key.rpartition("/")
        states.setdefault(name, {})[kind] = value
    own: dict[str, Any] = get_model_state_dict(module)
    _check("weights", weights, own)
    if not states:
        raise CheckpointError("the optimiser's state is empty")
    for name, kinds in states.items():  # a parameter that never had a gradient has no moments
        _check(f"moments of {name}", kinds, found["state"].get(name, {}))
    set_model_state_dict(module, dict(weights), options=WHOLE)
    set_optimizer_state_dict(module, optimisers, {**found, "state": states}, options=WHOLE)


def _check(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise for tensors whose names, shapes or types differ from the module's, and for tensors with NaN or infinity."""
    for name in sorted({*given, *own}):
        there, here = (_form(tensors.get(name)) for tensors in (given, own))
        if there != here:
            raise CheckpointError(f"{what}: {name} is {there}, expected {here}")
        if not given[name].isfinite().all():
            raise CheckpointError(f"{what}: {name} holds NaN or Inf")


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _keep_memory() -> None:
    """Keep freed memory of large tensors in the process: page faults on fresh memory cost as much as a norm."""
    if os.name == "posix" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
