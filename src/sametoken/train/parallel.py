"""Data parallelism: processes that share a step, the wrapper of the trained module, sums, and whole states.

Replicated drafts use torch's DistributedDataParallel; sharded ones use fully_shard on the whole draft at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
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

from sametoken.errors import CheckpointError, ConfigError
from sametoken.parallel.place import place_of, started
from sametoken.train.processes import Processes

WHOLE = StateDictOptions(full_state_dict=True)
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # of mallopt


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
