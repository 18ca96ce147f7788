"""Access to hidden states, token embedding and logits of a frozen transformers model, found by its structure.

transformers is not imported; any object with the methods of its causal language models works. Legend: B rows, S tokens
of a row, H hidden size, V vocabulary.
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

PROBE = 4  # tokens of the check of embedding and output layer


def config_of(model: Any) -> ModelConfig:
    """Configuration of a transformers model.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """
    values = model.config.to_dict()
    return ModelConfig.from_hf({**values, "architectures": [type(model).__name__]})


def decoder_of(model: Any) -> Any:
    """Model without its output layer; Llama 4 refers to itself as its decoder."""
    decoder = model.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") else decoder


def blocks_of(model: Any) -> nn.ModuleList:
    """Blocks of the model's decoder: the only module list with the configured number of blocks.

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
    """Current token embedding and output layer; call again after the model was moved."""
    vectors, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return OuterLayers.of(config, vectors.detach(), head.detach())


@contextmanager
def _outputs(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list that receives the blocks' outputs, in order, at the end of the context (one run of the model)."""
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
    """Hidden states of rows of tokens: [B, S, taps * H] of tapped blocks, and [B, S, H] after the final norm."""
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
    """Check, with a few tokens, that embeddings and logits are computed as the model's configuration states.

    Raises:
        UnsupportedModelError: the model scales or caps them differently, or its output layer has a bias.
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
