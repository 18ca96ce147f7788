"""Makes a small real Llama checkpoint cost what a large one costs, without changing what it says.

    python benchmarks/deepen.py SOURCE OUT --copies 8 --parameters 1.0e9

Two transformations, both exact in exact arithmetic:

- *Widen*: hidden, intermediate and query heads are repeated c times, c a power of two. The residual stream is c copies
  of the source's side by side. Every linear repeats its output rows and reads W / c in each copy, so the copies sum to
  the source's product; dividing by a power of two loses nothing in binary floating point. RMS norms do not change,
  since the mean of squares of copies is the mean of squares. The output head would sum c equal products: the final
  norm's weight is divided by c instead of the head, so that a tied head can stay tied and be the embedding.
- *Deepen*: blocks of random weights whose attention output and MLP down projections are zero are appended. They cost
  what any block costs and add nothing to the residual.

What rounding does is another matter: a sum over more terms rounds elsewhere, so a near-tie between two tokens may fall
the other way in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sametoken.checkpoint.hub import read_config, resolve
from sametoken.embedded import target
from sametoken.errors import ConfigError, SametokenError, UnsupportedModelError

TARGET_KV_HEADS = 8
SHARD_BYTES = 4 * 10**9
SMALL_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # everything beside the weights
BLOCK = "model.layers.{}."
IDENTITY_ZEROS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
Named = tuple[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """What the transformations need to know of a Llama.

    Attributes:
        copies: how often hidden, intermediate and query heads are repeated (c).
        kv_copies: how often key/value heads are.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    copies: int
    kv_copies: int

    def query_order(self) -> list[int]:
        """For each query head of the wide model, the source's head that it copies.

        A key head serves a run of neighbouring query heads, so the copies of a group's query heads stay beside each
        other, `copies / kv_copies` times over, under each copy of that group's key head.
        """
        group = self.heads // self.kv_heads
        return [
            key * group + query
            for _ in range(self.kv_copies)
            for key in range(self.kv_heads)
            for _ in range(self.copies // self.kv_copies)
            for query in range(group)
        ]

    def pick_queries(self, weight: Tensor) -> Tensor:
        """The rows of a query projection [heads * head_dim, in] in the wide model's order of heads."""
        return weight.reshape(self.heads, self.head_dim, -1)[self.query_order()].flatten(0, 1)


def wide_shape(config: dict[str, Any], copies: int, kv_copies: int | None) -> Shape:
    """Checks that a checkpoint can be widened so.

    Raises:
        UnsupportedModelError: it is not a Llama without biases.
        ConfigError: copies do not divide what they must.
    """
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedModelError(
            f"model_type {config.get('model_type')!r} (attention_bias {config.get('attention_bias')}, mlp_bias "
            f"{config.get('mlp_bias')}); only Llama checkpoints without biases can be widened"
        )
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if copies < 1 or copies & (copies - 1):
        raise ConfigError(f"--copies {copies} is not a power of two; anything else would round the weights")
    if kv_copies is None:
        kv_copies = math.gcd(copies, max(1, TARGET_KV_HEADS // kv_heads))
    if kv_copies < 1 or copies % kv_copies:
        raise ConfigError(f"--kv-copies {kv_copies} does not divide --copies {copies}")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return Shape(config["num_hidden_layers"], heads, kv_heads, head_dim, copies, kv_copies)


def wide_config(config: dict[str, Any], shape: Shape, layers: int) -> dict[str, Any]:
    """config.json of the result."""
    return config | {
        "hidden_size": config["hidden_size"] * shape.copies,
        "intermediate_size": config["intermediate_size"] * shape.copies,
        "num_attention_heads": shape.heads * shape.copies,
        "num_key_value_heads": shape.kv_heads * shape.kv_copies,
        "head_dim": shape.head_dim,
        "num_hidden_layers": layers,
    }


def widen(name: str, weight: Tensor, shape: Shape) -> Tensor:
    """One tensor of the source as the wide model has it, by its name in the checkpoint.

    Raises:
        UnsupportedModelError: a tensor that no Llama has.
    """
    copies = shape.copies
    match name.removesuffix(".weight").rpartition(".")[2]:
        case "embed_tokens" | "lm_head":
            return weight.repeat(1, copies)
        case "input_layernorm" | "post_attention_layernorm":
            return weight.repeat(copies)
        case "norm":
            return weight.repeat(copies) / copies
        case "q_proj":
            return shape.pick_queries(weight).repeat(1, copies) / copies
        case "k_proj" | "v_proj":
            return weight.repeat(shape.kv_copies, copies) / copies
        case "o_proj":
            return shape.pick_queries(weight.T).T.repeat(copies, 1) / copies
        case "gate_proj" | "up_proj" | "down_proj":
            return weight.repeat(copies, copies) / copies
        case _:
            raise UnsupportedModelError(f"the checkpoint has a tensor {name!r}, which a Llama does not have")


def identity_block(layer: int, like: Iterable[Named], seed: int = 0) -> Iterator[Named]:
    """The tensors of a block that adds nothing: random of its model's scale, the two output projections zero.

    Args:
        like: names and tensors of another block of the wide model, which give shapes, types and scales.
    """
    for index, (name, weight) in enumerate(like):
        part = name.split(".", 3)[3]
        generator = torch.Generator().manual_seed((seed * 1009 + layer) * 101 + index)
        noise = torch.zeros(weight.shape)
        if part not in IDENTITY_ZEROS:
            noise.normal_(weight.float().mean().item(), weight.float().std().item(), generator=generator)
        yield BLOCK.format(layer) + part, noise.to(weight.dtype)


def source_tensors(directory: Path) -> Iterator[Named]:
    """Every tensor of a safetensors checkpoint, one at a time, in order of name."""
    places: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    if not places:
        raise ConfigError(f"{directory} has no *.safetensors; convert the checkpoint first")
    for name in sorted(places):
        with safe_open(places[name], framework="pt") as opened:
            yield name, opened.get_tensor(name)


def deepened(directory: Path, shape: Shape, parameters: float) -> Iterator[Named]:
    """The tensors of the result: the wide model, then the fewest identity blocks that reach `parameters`."""
    total, first_block = 0, []
    for name, weight in source_tensors(directory):
        wide = widen(name, weight, shape).contiguous()
        total += wide.numel()
        if name.startswith(BLOCK.format(0)):
            first_block.append((name, wide))
        yield name, wide
    size = sum(weight.numel() for _, weight in first_block)
    missing = max(0, math.ceil((parameters - total) / size))
    for layer in range(shape.layers, shape.layers + missing):
        yield from identity_block(layer, first_block)


def write_shards(tensors: Iterable[Named], out: Path, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Writes tensors as one safetensors file, or as several of at most `shard_bytes` with an index; returns names.

    Holds no more than one shard in memory.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = held = 0

    def flush() -> None:
        save_file(pending, out / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, weight in tensors:
        if pending and held + weight.nbytes > shard_bytes:
            flush()
            held = 0
        pending[name] = weight
        held += weight.nbytes
        total += weight.nbytes
    flush()
    if len(shards) == 1:
        (out / "shard-0.safetensors").rename(out / "model.safetensors")
        return shards[0]
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (out / f"shard-{number}.safetensors").rename(out / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (out / "model.safetensors.index.json").write_text(text + "\n")
    return list(index)


def deepen(
    source: Path, out: Path, copies: int, kv_copies: int | None, parameters: float, positions: int | None = None
) -> dict[str, Any]:
    """Writes the large checkpoint with the source's tokenizer, and deepened.json, which says how it was made.

    Returns its config.

    Raises:
        SametokenError: the source cannot be widened so, or `out` already holds a checkpoint.
    """
    config = read_config(source)
    shape = wide_shape(config, copies, kv_copies)
    if any(out.glob("*.safetensors")):
        raise ConfigError(f"{out} already holds a checkpoint; name another directory or remove it")
    out.mkdir(parents=True, exist_ok=True)
    names = write_shards(deepened(source, shape, parameters), out)
    layers = 1 + max(int(name.split(".")[2]) for name in names if name.startswith("model.layers."))
    result = wide_config(config, shape, layers) | ({"max_position_embeddings": positions} if positions else {})
    for file in source.iterdir():
        if file.suffix in SMALL_SUFFIXES and ".safetensors" not in file.name:
            shutil.copy(file, out / file.name)
    (out / "config.json").write_text(json.dumps(result, indent=2) + "\n")
    made = {"copies": copies, "source_hidden_size": config["hidden_size"], "source_layers": shape.layers}
    (out / "deepened.json").write_text(json.dumps(made) + "\n")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="directory or Hub id of a Llama checkpoint; 'embedded' is the package's target")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--copies", type=int, default=8, help="how often the width is repeated, a power of two")
    parser.add_argument("--kv-copies", type=int, help="how often key/value heads are; by default towards 8 of them")
    parser.add_argument("--parameters", type=float, default=0.0, help="identity blocks are appended up to this count")
    parser.add_argument("--positions", type=int, help="longest context that the result states; default the source's")
    args = parser.parse_args()
    try:
        source = resolve(target(args.source))
        config = deepen(source, args.out, args.copies, args.kv_copies, args.parameters, args.positions)
    except (SametokenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    heads = f"{config['num_attention_heads']} query and {config['num_key_value_heads']} key/value heads"
    print(
        f"{args.out}: {config['hidden_size']} wide, {config['num_hidden_layers']} layers, {heads}, {size / 1e9:.2f} GB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
