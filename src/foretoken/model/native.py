"""A decoder's blocks as one call of the compiled kernels: its facts and weights as the structures that they read.

Computes what `model.decoder.Block` computes, in its order and with its roundings. Whatever stands beside a row never
shows in its bits, without blocks of rows, padded keys or trees taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from foretoken.model.linear import Linear
from foretoken.native.library import Layer, Library, Model, PackedWeight, Pages, Span, address, library, struct_of
from foretoken.runtime.cache import KVCache, View
from foretoken.runtime.cache import Span as CacheSpan

if TYPE_CHECKING:
    from foretoken.model.decoder import Block, Decoder

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
LANES = 16  # numbers of a vector: rows and heads are whole vectors


class NativeDecoder:
    """Blocks and head of a decoder on the CPU.

    Args:
        decoder: whole, its linears packed for the kernels.
        kernels: the compiled library.
    """

    def __init__(self, decoder: Decoder, kernels: Library) -> None:
        config, self._kernels = decoder.config, kernels
        cos, sin = (table.squeeze(1).contiguous() for table in decoder.rope_tables(torch.device("cpu")))
        blocks = _blocks(decoder)
        layers = (Layer * config.num_layers)(*(_layer(block) for block in blocks))
        head = decoder.embed.head if decoder.head is None else decoder.head
        assert head is not None
        self._head, self._norm = _packed(head), (decoder.norm.weight, decoder.norm.eps)
        self._model = struct_of(
            Model, layers=config.num_layers, hidden=config.hidden_size, heads=config.num_heads,
            kv_heads=config.num_kv_heads, head_size=config.head_dim, rotated=config.rope.dim,
            intermediate=config.intermediate_size, activation=ACTIVATIONS[config.activation], eps=config.norm_eps,
            embed_packed=decoder.embed.paired, embed=decoder.embed.weight.detach(), vocabulary=config.vocab_size,
            cos=cos, sin=sin, positions=cos.shape[0], layer=layers,
        )  # fmt: skip
        self._kept = (cos, sin, layers, decoder)  # what the structures point to
        self._nbytes = sum(_packed(linear).nbytes for block in blocks for linear in _linears(block))

    @staticmethod
    def of(decoder: Decoder) -> NativeDecoder | None:
        """The compiled form of a decoder, None where the kernels are missing or cannot compute it."""
        kernels, config = library(), decoder.config
        head = decoder.embed.head if decoder.head is None else decoder.head
        linears = [*chain.from_iterable(_linears(block) for block in _blocks(decoder)), head]
        whole = all(linear is not None and linear.native is not None for linear in linears)
        fits = not any(width % LANES for width in (config.hidden_size, config.intermediate_size, config.head_dim))
        return NativeDecoder(decoder, kernels) if kernels is not None and whole and fits else None

    def __call__(
        self, tokens: Tensor, cache: KVCache, view: View, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs `tokens` [T] at the places that `view` names: the last block's output and the taps, each [T, H]."""
        pages = _pages(cache)
        kept = [(span, span.reach.contiguous()) for span in view.spans]
        found = {tap: torch.empty(tokens.shape[0], self._model.hidden, dtype=torch.bfloat16) for tap in taps}
        outputs = [found.get(layer) for layer in range(self._model.layers)]
        spans = [_span(span, reach) for span, reach in kept]
        last = self._kernels.forward(self._model, pages, spans, tokens.contiguous(), outputs, self._nbytes)
        return last, tuple(found[tap] for tap in taps)

    def chain(self, last: Tensor, cache: KVCache, rows: Tensor, starts: Tensor, levels: int) -> Tensor:
        """Greedy continuations [B, levels] of rows of the cache.

        Args:
            last: [B, H] output of the last block for each row's last token.
            rows, starts: [B] rows, and the indexes that their next tokens go to; the last of them is not run.
        """
        span: Span = struct_of(Span, batch=len(rows), nodes=1, total=1, rows=rows, starts=starts)
        weight, _ = self._norm
        return self._kernels.chain(
            self._model, _pages(cache), self._head, weight, span, last.clone(), levels, self._nbytes
        )

    def logits(self, last: Tensor) -> Tensor:
        """[R, V] float32 from rows of the last block's output [R, H]."""
        return self._kernels.linear(self._head, last, torch.float32, self._norm)


def _pages(cache: KVCache) -> Pages:
    table = cache.table.table
    found: Pages = struct_of(
        Pages, keys=cache.keys, values=cache.values, layer_stride=cache.keys.stride(0),
        page_size=cache.table.page_size, table_stride=table.stride(0), table=table,
    )  # fmt: skip
    return found


def _span(span: CacheSpan, reach: Tensor) -> Span:
    batch, total = reach.shape[:2]
    found: Span = struct_of(
        Span, batch=batch, nodes=span.nodes, total=total, rows=span.rows, starts=span.starts, reach=reach
    )
    return found


def _blocks(decoder: Decoder) -> list[Block]:
    return cast("list[Block]", list(decoder.blocks))


def _linears(block: Block) -> tuple[Linear, ...]:
    return block.qkv, block.out, block.gate_up, block.down


def _packed(linear: Linear) -> PackedWeight:
    assert linear.native is not None
    return linear.native


def _layer(block: Block) -> Layer:
    norms = (block.attention_norm, block.q_norm, block.k_norm, block.mlp_norm)
    names = ("attention_norm", "q_norm", "k_norm", "mlp_norm")
    pointers = {name: None if norm is None else address(norm.weight) for name, norm in zip(names, norms, strict=True)}
    qkv, out, gate_up, down = (_packed(each).weight for each in _linears(block))
    return Layer(**pointers, qkv=qkv, out=out, gate_up=gate_up, down=down, window=block.window or 0)
