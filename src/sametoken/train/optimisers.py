"""Optimisers: AdamW, or Muon for the matrices inside a head with AdamW for all other parameters.

Muon (Jordan et al. 2024) orthogonalises every update of a matrix, which needs fewer steps; its rate is scaled so that
one learning rate fits both (Liu et al., arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

BETAS = (0.9, 0.95)
Name = Literal["adamw", "muon"]


def optimisers(model: nn.Module, name: Name, decay: float) -> list[torch.optim.Optimizer]:
    """Optimisers of all trained parameters, whole or sharded; norms and biases do not decay.

    Args:
        name: "adamw", or "muon" with AdamW for vectors, embeddings and output layers.
        decay: weight decay of matrices, per step and unit of the learning rate.
    """
    inner = [p for n, p in model.named_parameters() if name == "muon" and _is_inner(n, p)]
    taken = {id(parameter) for parameter in inner}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    groups = list(_groups(rest, decay))
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=BETAS, fused=True)] if groups else []
    if inner:
        kind = ShardedMuon if isinstance(inner[0], DTensor) else torch.optim.Muon
        found.append(kind(inner, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return found


class ShardedMuon(torch.optim.Muon):
    """Muon of torch for sharded matrices.

    Momentum is computed on the shards. The update of a matrix is then gathered, every process orthogonalises the whole
    update, as for unsharded matrices, and each adds its own rows.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Perform one step; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                gradient = matrix.grad
                if gradient is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                moment = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(moment, group["momentum"])
                added = _orthogonal_step(update.full_tensor(), group)
                own = distribute_tensor(added, matrix.device_mesh, matrix.placements, src_data_rank=None)
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(own)


def _orthogonal_step(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Update of a whole matrix by Muon: torch's step from zeros, without momentum and weight decay."""
    moved = nn.Parameter(torch.zeros_like(update))
    moved.grad = update
    kept = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([moved], **kept, weight_decay=0.0, momentum=0.0, nesterov=False).step()  # type: ignore[no-untyped-call]
    return moved.detach()


def _is_inner(name: str, parameter: Tensor) -> bool:
    """True if a parameter is a matrix that maps hidden states to hidden states."""
    return parameter.dim() == 2 and not name.endswith("head.weight") and "embed" not in name


def _groups(parameters: list[nn.Parameter], decay: float) -> Iterator[dict[str, object]]:
    for matrices, share in ((True, decay), (False, 0.0)):
        group = [parameter for parameter in parameters if (parameter.dim() > 1) is matrices]
        if group:
            yield {"params": group, "weight_decay": share}
