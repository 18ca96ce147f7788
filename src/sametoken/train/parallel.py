"""Processes that share a step: their number, the wrapper of what they train, sums over them, whole states from them.

Plain data parallelism is accelerate's; sharding is torch's own fully_shard, over the whole head, which is small.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from sametoken.errors import ConfigError, SametokenError
from sametoken.train.journal import missing

if TYPE_CHECKING:
    from accelerate import Accelerator

WHOLE = StateDictOptions(full_state_dict=True)
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # of mallopt


class Parallel:
    """The processes of a run.

    Args:
        device: "auto", or where this process computes.
        fsdp: shard what is trained instead of copying it.

    Attributes:
        rank, count: of the processes. `main`: whether this one writes and evaluates.
    """

    def __init__(self, device: str, fsdp: bool) -> None:
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise ConfigError(missing("accelerate")) from error
        cpu = device == "cpu" or not torch.cuda.is_available()
        if device.startswith("cuda") and cpu:
            raise ConfigError(f"device {device!r}: this machine or this build of torch has no CUDA; use 'cpu'")
        self._accelerator: Accelerator = Accelerator(cpu=cpu)
        self._fsdp = fsdp and self._accelerator.num_processes > 1
        self.rank, self.count = self._accelerator.process_index, self._accelerator.num_processes
        self.main, self.device = self.rank == 0, self._accelerator.device
        if self.device.type == "cpu":
            _keep_memory()

    def wrap(self, module: nn.Module) -> nn.Module:
        """What to call instead of `module`; its parameters may be other objects afterwards."""
        if self.count == 1:
            return module
        if self._fsdp:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.count,)))
            return module
        return nn.parallel.DistributedDataParallel(module)

    def waiting(self, module: nn.Module, wait: bool) -> AbstractContextManager[Any]:
        """Within it a backward does not exchange gradients, because another follows."""
        if self.count == 1 or not wait or self._fsdp:
            return nullcontext()
        return module.no_sync()  # type: ignore[no-any-return,operator]

    def clip(self, module: nn.Module, norm: float) -> float:
        """Clips the gradients to a norm over all of them; returns what it was."""
        found = torch.nn.utils.clip_grad_norm_(module.parameters(), norm)
        return float(found.full_tensor() if hasattr(found, "full_tensor") else found)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.count > 1:
            torch.distributed.all_reduce(values)
        return values

    def agreed(self, value: Any) -> Any:
        """What the main process says, in all of them. Raises SametokenError where one has ended with an error."""
        if self.count == 1:
            return value
        said = [value]
        try:
            torch.distributed.broadcast_object_list(said)
        except RuntimeError as error:
            raise SametokenError("another process of this run has ended; it says why") from error
        return said[0]

    def close(self) -> None:
        """Ends the group of processes; a process that failed ends without, since it would wait for the others."""
        if self.count > 1:
            self._accelerator.wait_for_everyone()
            self._accelerator.end_training()


def whole_states(
    module: nn.Module, optimisers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights by name, and the optimisers' moments by "name/kind", whole and on the CPU; call it in every process."""
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
    """Puts whole states back, whatever the number of processes is now."""
    set_model_state_dict(module, dict(weights), options=WHOLE)
    found: dict[str, Any] = get_optimizer_state_dict(module, optimisers, options=WHOLE)
    states: dict[str, Any] = {}
    for key, value in moments.items():
        name, _, kind = key.rpartition("/")
        states.setdefault(name, {})[kind] = value
    set_optimizer_state_dict(module, optimisers, {**found, "state": states}, options=WHOLE)


def _keep_memory() -> None:
    """Large tensors come from memory that stays with the process: fresh pages for each cost as much as a norm."""
    if os.name == "posix" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
