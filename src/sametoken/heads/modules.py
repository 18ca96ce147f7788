"""What is done to the modules of heads of every kind: packing for serving, first weights for training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.module import MedusaHead, MedusaHeads
from sametoken.model.linear import Embedding, Linear

STD = 0.02  # of random weights, as transformers initialises linears


def pack(module: nn.Module) -> None:
    """Packs every linear of a head that will only be served."""
    for part in module.modules():
        if isinstance(part, Linear | Embedding):
            part.deterministic = False  # a guess may differ beside other rows; it changes no token
            part.pack()


def initialise(
    module: EagleHead | MedusaHeads, target_head: Tensor, generator: torch.Generator, std: float = STD
) -> None:
    """Weights to begin training with, in place: random ones, output layers copied from the target's.

    Medusa's residual blocks begin at zero, so that head i begins as the target's own guess.

    Args:
        target_head: [V, Ht] the target's output layer; used where the head is as wide as the target.
        std: standard deviation of the random weights.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        elif isinstance(module, MedusaHeads) and ".blocks." in name:
            parameter.data.zero_()
        else:
            parameter.data.normal_(0.0, std, generator=generator)
    if isinstance(module, EagleHead):
        if module.head is not None and target_head.shape[1] == module.config.layers.hidden_size:
            module.head.weight.data.copy_(target_head[module.draft_ids.to(target_head.device)])
        return
    for part in module.modules():
        if isinstance(part, MedusaHead) and part.head is not None:
            part.head.weight.data.copy_(target_head)
