"""Access to a frozen transformers model for training a head, found by its structure: hidden states, vectors, scores.

transformers itself is not imported; whatever has the methods of its causal language models will do. Legend: B rows,
S tokens of a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sametoken.errors import UnsupportedModelError
from sametoken.learning.target import Features, OuterLayers
from sametoken.model.config import ModelConfig

PROBE = 4  # tokens that show whether a model's ends are what they seem


def config_of(model: Any) -> ModelConfig:
    """The architecture of a transformers model.

    Raises:
        UnsupportedModelError: it is none that can be served here.
    """
    values = model.config.to_dict()
    return ModelConfig.from_hf({**values, "architectures": [type(model).__name__]})


def decoder_of(model: Any) -> Any:
    """The model without its output layer; Llama 4 names itself as its decoder."""
    decoder = model.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") else decoder


def blocks_of(model: Any) -> nn.ModuleList:
    """The blocks of the model's decoder: the one list of as many modules as it says it has.

    Raises:
        UnsupportedModelError: there is no such list.
    """
    count = config_of(model).num_layers
    lists = [part for part in decoder_of(model).modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if not lists:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {count} blocks in its decoder; expected one, as Llama has"
        )
    return lists[0]


def outer_of(model: Any, config: ModelConfig) -> OuterLayers:
    """Token vectors and output layer as they are now; they move with the model, so ask again when they may have."""
    vectors, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return OuterLayers.of(config, vectors.detach(), head.detach())


@contextmanager
def _outputs(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Outputs of the blocks, in order; filled at the end of this context, in which the model runs once."""
    found: dict[int, Tensor] = {}

    def keep(place: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            found[place] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [block.register_forward_hook(keep(place)) for place, block in enumerate(blocks)]
    outputs: list[Tensor] = []
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
    outputs += [found[place] for place in range(len(blocks))]


@torch.no_grad()
def read(model: Any, tokens: Tensor, attention_mask: Tensor | None, taps: Sequence[int]) -> Features:
    """Hidden states of rows of tokens: [B, S, taps * H] of the blocks, and [B, S, H] after the final norm."""
    extra: dict[str, Any] = {}
    if attention_mask is not None:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        extra = {"attention_mask": attention_mask, "position_ids": positions}
    blocks = blocks_of(model)
    with _outputs([blocks[tap] for tap in taps]) as outputs:
        last: Tensor = decoder_of(model)(input_ids=tokens, use_cache=False, **extra).last_hidden_state
    return Features(torch.cat(outputs, dim=-1) if outputs else last[..., :0], last)


@torch.no_grad()
def check_outer(model: Any) -> None:
    """That vectors enter the blocks and scores are made as the model's configuration says, by running a few tokens.

    Raises:
        UnsupportedModelError: the model scales or caps them otherwise, or its output layer has a bias.
    """
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UnsupportedModelError(f"{type(model).__name__}: expected an output layer without a bias")
    table = model.get_input_embeddings().weight
    if table.is_meta:
        return
    tokens = torch.arange(PROBE, device=table.device).unsqueeze(0)
    entered: list[Tensor] = []

    def hook(module: nn.Module, arguments: Any, named: Any) -> None:
        entered.append(arguments[0] if arguments else named["hidden_states"])

    handle = blocks_of(model)[0].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        scores: Tensor = model(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    config, last = config_of(model), read(model, tokens, None, ()).last
    product = (last.to(head.weight.dtype) @ head.weight.T).float() * config.logits_scale
    cap = config.logits_cap
    for name, found, plain in (
        ("token vectors", entered[0], table[tokens] * config.embed_scale),
        ("scores", scores, product if cap is None else cap * torch.tanh(product / cap)),
    ):
        if not torch.allclose(found.float(), plain.float(), rtol=0.05, atol=0.02 * float(plain.float().abs().max())):
            raise UnsupportedModelError(
                f"{type(model).__name__} scales or caps its {name} otherwise than its configuration says; expected a "
                "model with one table from tokens to vectors and one from hidden states to scores, as Llama, Mistral, "
                "Phi 3, Qwen 2 and Qwen 3 have"
            )
