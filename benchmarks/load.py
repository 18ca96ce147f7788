"""What loading costs, format by format: seconds beside those of reading the files alone, and the peak of memory.

    python benchmarks/load.py DIR [--cases bf16,awq] [--layers 16] [--rounds 3] [--cold] [--keep] [--out load.json]
    python benchmarks/load.py --models MODEL.gguf,MODEL_DIR [--rounds 3] [--cold] [--out load.json]

Checkpoints of a Llama shape with random weights and codes are made in DIR, one at a time (3 GB), and removed unless
--keep is given; or those of --models are loaded. A load, a read and a skim of the same files alternate, each in a
process of its own. A read leaves the files' bytes in new memory of the kind that weights get, which a load must fill
too; a skim reads them into one buffer of 1 MB, as `cat` does. --cold asks the system to forget the files before each.
The peak is that of the whole process less what it had before; it is to stay below the files and the largest layer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint import weight_cache
from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.gguf.config import config_of
from sametoken.checkpoint.gguf.container import read_container
from sametoken.checkpoint.hub import resolve
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.quantised.write import LAYOUTS, stated
from sametoken.checkpoint.tensors import weight_files
from sametoken.checkpoint.write import Shards
from sametoken.kernels.cpu.memory import new_memory
from sametoken.kernels.cpu.variant import library
from sametoken.model.formats.coded import Code, Coded
from sametoken.model.linear import Embedding, Linear

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip
PROJECTIONS = {
    "self_attn.q_proj": (2048, 2048), "self_attn.k_proj": (512, 2048), "self_attn.v_proj": (512, 2048),
    "self_attn.o_proj": (2048, 2048), "mlp.gate_proj": (8192, 2048), "mlp.up_proj": (8192, 2048),
    "mlp.down_proj": (2048, 8192),
}  # fmt: skip
GGUF_NAMES = dict(
    zip(PROJECTIONS, ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), strict=True)
)
GROUP = 128
PLAIN_CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True},
}

Parts = dict[str, Tensor]


class Case(NamedTuple):
    """A checkpoint and how it is loaded.

    Attributes:
        make: its weight's tensors by the last part of their names, from [out, in]; None where the file is GGUF.
        blocks: GGUF's type of each projection's blocks.
        quantization: what `--quantization` says.
        again: whether an earlier start has packed it.
    """

    make: Callable[[int, int], Parts] | None
    blocks: Callable[[str], str] | None = None
    quantization: str = "none"
    again: bool = False


def plain(outputs: int, inputs: int) -> Parts:
    return {"weight": (torch.randn(outputs, inputs) * 0.02).to(torch.bfloat16)}


def some_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape: int) -> Tensor:
    return some_bytes(*shape[:-1], 4 * shape[-1]).view(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(shape) * 0.01 + 0.001).to(dtype)


def written(format: str) -> Callable[[int, int], Parts]:
    """As `sametoken quantize` writes a format, with random codes."""

    def make(outputs: int, inputs: int) -> Parts:
        if format == "fp8":
            codes = some_bytes(outputs, inputs) & 0xF7  # no NaN
            weight = Coded(Code.FP8, codes.view(torch.float8_e4m3fn), scales(outputs, 1), inputs, inputs)
        elif format == "int8":
            codes = some_bytes(outputs, inputs).view(torch.int8)
            weight = Coded(Code.INT8, codes, scales(outputs, 1), inputs, inputs, dynamic=True)
        elif format == "int4":
            scale = scales(outputs, inputs // GROUP)
            weight = Coded(Code.INT4, some_bytes(outputs, inputs // 2), scale, inputs, GROUP)
        else:
            size = 16 if format == "nvfp4" else 32
            scale = (some_bytes(outputs, inputs // size) & 15) + 100
            scale = scale.view(torch.float8_e4m3fn if format == "nvfp4" else torch.float8_e8m0fnu)
            factor = torch.full((outputs,), 1e-5) if format == "nvfp4" else None
            weight = Coded(Code.FP4, some_bytes(outputs, inputs // 2), scale, inputs, size, factor=factor)
        return LAYOUTS[format].parts(weight, 1.0)

    return make


def awq(outputs: int, inputs: int) -> Parts:
    groups = inputs // GROUP
    scale = scales(groups, outputs, dtype=torch.float16)
    return {"qweight": words(inputs, outputs // 8), "qzeros": words(groups, outputs // 8), "scales": scale}


def gptq(outputs: int, inputs: int, ordered: bool = False) -> Parts:
    groups, index = inputs // GROUP, torch.arange(inputs, dtype=torch.int32) // GROUP
    return {
        "qweight": words(inputs // 8, outputs), "qzeros": words(groups, outputs // 8),
        "scales": scales(groups, outputs, dtype=torch.float16),
        "g_idx": index[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))] if ordered else index,
    }  # fmt: skip


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M in half of its layers."""
    return "Q6_K" if name in ("self_attn.v_proj", "mlp.down_proj") else "Q4_K"


CASES: dict[str, Case] = {
    "bf16": Case(plain),
    **{name: Case(written(name)) for name in ("fp8", "nvfp4", "mxfp4", "int4", "int8")},
    "awq": Case(awq),
    "gptq": Case(gptq),
    "gptq-order": Case(lambda outputs, inputs: gptq(outputs, inputs, ordered=True)),
    **{f"gguf-{kind.lower()}": Case(None, lambda name, kind=kind: kind) for kind in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")},  # type: ignore[misc]
    "gguf-q4_k_m": Case(None, mixed),
    "on load int8": Case(plain, None, "int8"),
    "on load int8, again": Case(plain, None, "int8", again=True),
    "on load int4": Case(plain, None, "int4"),
    "on load int4, again": Case(plain, None, "int4", again=True),
}


def tensors(make: Callable[[int, int], Parts], layers: int) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint."""
    size, vocabulary = SHAPE["hidden_size"], SHAPE["vocab_size"]
    yield "model.embed_tokens.weight", plain(vocabulary, size)["weight"]  # type: ignore[arg-type]
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", torch.ones(size, dtype=torch.bfloat16)  # type: ignore[call-overload]
        for name, shape in PROJECTIONS.items():
            for kind, part in make(*shape).items():
                yield f"model.layers.{layer}.{name}.{kind}", part
    yield "model.norm.weight", torch.ones(size, dtype=torch.bfloat16)  # type: ignore[call-overload]
    yield "lm_head.weight", plain(vocabulary, size)["weight"]  # type: ignore[arg-type]


def write_directory(place: Path, name: str, make: Callable[[int, int], Parts], layers: int) -> None:
    shards = Shards(place)
    for key, tensor in tensors(make, layers):
        shards.add(key, tensor)
    shards.finish()
    files: dict[str, dict[str, Any]] = {"config.json": {}}
    if name in PLAIN_CONFIGS:
        files["config.json"] = {"quantization_config": PLAIN_CONFIGS[name]}
    elif name in LAYOUTS:
        size = {"int4": GROUP, "nvfp4": 16, "mxfp4": 32}.get(name)
        files = stated(name, size, ["lm_head"], "benchmark")
    files["config.json"] |= SHAPE | {"num_hidden_layers": layers}
    for file, content in files.items():
        (place / file).write_text(json.dumps(content))


def random_blocks(kind: str, outputs: int, inputs: int) -> Any:
    """uint8 [out, bytes] of blocks whose scales are finite."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = some_bytes(outputs, inputs // numbers, size)
    for at in {"Q6_K": (208,), "Q4_K": (0, 2)}.get(kind, (0,)):
        blocks[:, :, at : at + 2] = scales(*blocks.shape[:2], 1, dtype=torch.float16).view(torch.uint8)
    return blocks.flatten(1).numpy()


def write_gguf(place: Path, kind_of: Callable[[str], str], layers: int) -> None:
    import gguf

    writer = gguf.GGUFWriter(place / "model.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(2048)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(8192)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(32000)
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for key, tensor in tensors(lambda outputs, inputs: {"weight": torch.empty(outputs, inputs)}, layers):
        module = key.removesuffix(".weight")
        if module in outside:
            ours, kind = outside[module], "Q6_K"
        else:
            layer, path = module.split(".", 3)[2:]
            ours, kind = f"blk.{layer}.{(norms | GGUF_NAMES)[path]}", "" if path in norms else kind_of(path)
        if tensor.dim() == 1:
            writer.add_tensor(f"{ours}.weight", tensor.float().numpy())
        else:
            data = random_blocks(kind, *tensor.shape)
            writer.add_tensor(f"{ours}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (place / LINK).symlink_to(place / "model.gguf")
    (place / "config.json").write_text(json.dumps(config_of(read_container(place / LINK))))


def make_checkpoint(place: Path, name: str, case: Case, layers: int) -> None:
    if (place / "config.json").exists():
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    torch.manual_seed(0)
    if case.make is None:
        assert case.blocks is not None
        write_gguf(place, case.blocks, layers)
    else:
        write_directory(place, name, case.make, layers)
    os.sync()


def memory(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def load(place: Path, quantization: str) -> dict[str, float]:
    """Loads in this process; VmHWM is made that of the load alone."""
    library()
    begun = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    clock, processor = time.perf_counter(), time.process_time()
    decoder = load_decoder(place, torch.bfloat16, "cpu", None, quantization, cache=True)
    found = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - processor}
    found["peak"] = memory("VmHWM") - begun
    found["held"] = memory("VmRSS") - begun
    layers = [module for module in decoder.modules() if isinstance(module, Linear) and module.native is not None]
    sizes = [module.native.nbytes for module in layers if module.native is not None]
    sizes += [module.weight.nbytes for module in decoder.modules() if isinstance(module, Embedding)]
    return found | {"layer": max(sizes)}


def read(files: list[Path]) -> dict[str, float]:
    """Reads whole files into new memory."""
    begun = time.perf_counter()
    size = 0
    for file in files:
        data = new_memory((file.stat().st_size,), torch.uint8)
        with file.open("rb", buffering=0) as opened:
            at = 0
            while count := opened.readinto(data.numpy()[at:]):
                at += count
        size += at
    return {"seconds": time.perf_counter() - begun, "bytes": size}


def skim(files: list[Path]) -> dict[str, float]:
    """Reads whole files into the same small memory."""
    begun, buffer = time.perf_counter(), bytearray(1 << 20)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return {"seconds": time.perf_counter() - begun}


def forget(files: list[Path]) -> None:
    """Asks the system to drop files from its cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(cache: Path, *arguments: str) -> dict[str, float]:
    """One measurement in a process of its own."""
    environment = {**os.environ, weight_cache.CACHE_VARIABLE: str(cache)}
    command = [sys.executable, __file__, "", "--child", *arguments]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def measure(place: Path, cache: Path, case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Medians of some rounds over a checkpoint directory."""
    load_arguments = ("load", str(place), case.quantization)
    if case.again and not list(cache.glob("*")):
        child(cache, *load_arguments)
    files, pool = list(weight_files(place)), list(cache.glob("*/*.safetensors"))
    whole = [str(file) for file in (pool if case.again else files)]
    loads, reads, skims = [], [], []
    for _ in range(options.rounds):
        if not case.again:
            shutil.rmtree(cache, ignore_errors=True)
        for done, arguments in ((loads, load_arguments), (reads, ("read", *whole)), (skims, ("skim", *whole))):
            if options.cold:
                forget(files + pool)
            done.append(child(cache, *arguments))
    found = {key: statistics.median(each[key] for each in loads) for key in loads[0]}
    found |= {"bytes": reads[0]["bytes"], "read_seconds": statistics.median(each["seconds"] for each in reads)}
    found["skim_seconds"] = statistics.median(each["seconds"] for each in skims)
    found["speed"] = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(loads, reads, strict=True))
    return found


def line(name: str, found: dict[str, float]) -> str:
    size, peak, layer = found["bytes"] / 1e6, found["peak"] / 1e6, found["layer"] / 1e6
    return (
        f"| {name} | {size:.0f} | {found['skim_seconds']:.2f} | {found['read_seconds']:.2f} | "
        f"{found['seconds']:.2f} ({found['cpu_seconds']:.2f}) | {found['speed']:.2f} | {found['held'] / 1e6:.0f} | "
        f"{peak:.0f} | {size + layer:.0f} | {peak / (size + layer):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--models")
    parser.add_argument("--cases", default=",".join(name for name in CASES if "again" not in name))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *rest = options.child
        files = list(map(Path, rest))
        print(json.dumps(load(files[0], rest[1]) if kind == "load" else {"read": read, "skim": skim}[kind](files)))
        return
    if (options.models is None) == (options.directory is None):
        parser.error("give either DIR or --models")
    columns = ("format", "MB", "s to skim", "s to read", "s to load (CPU)", "read / load", "MB held", "MB peak")
    print("|".join(("", *columns, "MB allowed", "share", "")), f"|{'---|' * 10}", sep="\n")
    results: dict[str, dict[str, float]] = {}
    for name in (options.models or options.cases).split(","):
        if options.models:
            place, case, cache = resolve(name), Case(None), Path("0")
        else:
            case, cache = CASES[name], options.directory / "cache"
            place = options.directory / ("bf16" if case.make is plain else name)
            make_checkpoint(place, name, case, options.layers)
        results[Path(name).name] = measure(place, cache, case, options)
        print(line(*list(results.items())[-1]), flush=True)
        if not (options.models or options.keep or case.make is plain):
            shutil.rmtree(place)
    if options.out is not None:
        kept = json.loads(options.out.read_text()) if options.out.exists() else {}
        kept.setdefault("cold" if options.cold else "warm", {}).update(results)
        options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
