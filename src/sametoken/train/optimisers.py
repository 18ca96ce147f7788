"""What turns gradients into steps: AdamW, or Muon for the matrices inside a head and AdamW for the rest.

Muon (Jordan et al. 2024) makes every update of a matrix orthogonal, which gets further in few steps; its rate is scaled
so that one learning rate means the same for both (Liu et al., arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
Name = Literal["adamw", "muon"]


def optimisers(model: nn.Module, name: Name, decay: float) -> list[torch.optim.Optimizer]:
    """The optimisers of all that is trained; norms and biases do not decay.

    Args:
        name: "muon" has AdamW beside it for vectors, token vectors and output layers.
        decay: of matrices, for each step and unit of the learning rate.
    """
    inner = [p for n, p in model.named_parameters() if name == "muon" and _is_inner(n, p)]
    taken = {id(parameter) for parameter in inner}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    groups = list(_groups(rest, decay))
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=BETAS, fused=True)] if groups else []
    if inner:
        found.append(torch.optim.Muon(inner, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return found


def _is_inner(name: str, parameter: Tensor) -> bool:
    """Whether a parameter turns hidden states into hidden states."""
    return parameter.dim() == 2 and not name.endswith("head.weight") and "embed" not in name


def _groups(parameters: list[nn.Parameter], decay: float) -> Iterator[dict[str, object]]:
    for matrices, share in ((True, decay), (False, 0.0)):
        group = [parameter for parameter in parameters if (parameter.dim() > 1) is matrices]
        if group:
            yield {"params": group, "weight_decay": share}
