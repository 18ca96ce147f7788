"""Peak memory of a step of latent attention (MLA): sizes of the tensors of `model.latent` and `attention`.

Torch computes this attention with a mask per query head, and with queries as wide as the cached vectors.
"""

from __future__ import annotations

import torch

from sametoken.model.attention import tile_height
from sametoken.model.config import ModelConfig
from sametoken.model.latent_config import LatentConfig
from sametoken.runtime.cache import KEY_BLOCK
from sametoken.runtime.kv_format import SCALE_BYTES, KVFormat

FLOAT, INDEX = 4, 8  # bytes


def step_bytes(
    config: ModelConfig, latent: LatentConfig, dtype: torch.dtype, form: KVFormat, rows: int, nodes: int, length: int
) -> int:
    """Bytes of activations in attention of one layer, with hidden states.

    Args:
        config: configuration of the model.
        latent: its latent attention.
        dtype: data type of activations.
        form: storage format of the KV cache.
        rows: number of rows.
        nodes: new tokens of each row, a chain.
        length: keys of each row, with those of the new tokens.
    """
    heads, size, parts = config.num_heads, dtype.itemsize, config.cached_parts
    cached, keys = sum(parts), -(-length // KEY_BLOCK) * KEY_BLOCK
    tile = tile_height(heads, dtype)
    tiles = -(-nodes // tile)
    tokens, padded = rows * nodes, rows * tiles * tile
    # Hidden state and its norm, queries, their part with RoPE and its key, four forms of the new keys, RoPE tables.
    row = 2 * config.hidden_size + heads * (config.head_dim + latent.rotated) + 3 * latent.rotated + 4 * cached
    base = tokens * (row * size + 4 * INDEX)
    mask, query = padded * heads * keys * size, heads * cached * size
    stored, copied = rows * keys * cached * size, rows > 1 and tiles > 1  # keys per tile, separate values
    held = base + mask + tokens * query
    read = 2 * tiles * stored if copied else stored
    copying = read + copied * stored + padded * query
    building = read + padded * (query + keys * size) + tokens * keys
    ending = read + 3 * padded * query + (rows > 1 and padded > tokens) * tokens * query
    decoding = 0
    if form.greatest is not None:  # codes and scales; both parts, the last in float32; both joined
        widest = max(2 * FLOAT * parts[-1] + size * parts[0], 2 * size * cached)
        decoding = rows * keys * (cached + SCALE_BYTES * len(parts) + widest)
    return held + max(copying, building, ending, decoding)
