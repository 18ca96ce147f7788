"""Peak memory of a step of latent attention, counted tensor by tensor as `model.latent` and `attention` do.

Torch computes it, with a mask for each query head and copies of the queries, which are as wide as what is cached.
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
    """Bytes of the activations in attention of one layer, hidden states included.

    Args:
        dtype: of activations. `form`: how the cache stores keys.
        rows: sequences. `nodes`: new tokens of each, a chain. `length`: keys of each with them.
    """
    heads, size, parts = config.num_heads, dtype.itemsize, config.cached_parts
    cached, keys = sum(parts), -(-length // KEY_BLOCK) * KEY_BLOCK
    tile = tile_height(heads, dtype)
    tiles = -(-nodes // tile)
    tokens, padded = rows * nodes, rows * tiles * tile
    # Hidden state and its norm, plain queries, rotated ones and their key, four forms of the new keys, the rotation.
    row = 2 * config.hidden_size + heads * (config.head_dim + latent.rotated) + 3 * latent.rotated + 4 * cached
    base = tokens * (row * size + 4 * INDEX)
    mask, query = padded * heads * keys * size, heads * cached * size
    stored, copied = rows * keys * cached * size, rows > 1 and tiles > 1  # keys for each tile, and values apart
    held = base + mask + tokens * query
    read = 2 * tiles * stored if copied else stored
    copying = read + copied * stored + padded * query
    building = read + padded * (query + keys * size) + tokens * keys
    ending = read + 3 * padded * query + (rows > 1 and padded > tokens) * tokens * query
    decoding = 0
    if form.greatest is not None:  # codes and scales, then the last part in float32 beside the first, then both joined
        widest = max(2 * FLOAT * parts[-1] + size * parts[0], 2 * size * cached)
        decoding = rows * keys * (cached + SCALE_BYTES * len(parts) + widest)
    return held + max(copying, building, ending, decoding)
