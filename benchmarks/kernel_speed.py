"""How near the linear kernels come to reading weights at the speed of memory, for 1 to 16 rows, beside torch's own.

    python benchmarks/kernel_speed.py [--rounds 5] [--threads 2] [--rows 1,2,4,5,8,16] [--only avx512]
                                 [--out docs/benchmarks]

Every kernel runs over copies of one weight that do not fit the caches, in turns with the others and with a probe that
only reads memory (a sum). The copies are made for a kernel's turn and freed after it: it takes 2 GB of memory.
Figures are gigabytes of weights a second, the median over rounds; the share of the probe is taken within a round.
Foreign load is logged.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from cpu_step import busy
from torch import Tensor

from sametoken.kernels.cpu.library import Library, PackedWeight
from sametoken.kernels.cpu.memory import settled
from sametoken.kernels.cpu.variant import VARIANTS, file_of, processor_features
from sametoken.model.formats.coded import BITS, Code, Coded
from sametoken.model.formats.names import FORMATS
from sametoken.model.formats.packing import pack_bfloat16

OUTPUTS, INPUTS = 8192, 2048
BYTES = 3 * 2**28  # of weights that one pass reads
PROBE = 2**29

Pass = Callable[[Tensor], None]  # one product of rows [M, INPUTS] with every copy
Maker = Callable[[], tuple[Pass, int]]  # makes the copies: a pass over them, and the bytes that it reads


def coded(code: Code, group: int, scale: torch.dtype, *, zeros: bool = False) -> Coded:
    """A weight of another tool's format with random codes."""
    groups = INPUTS // group
    size = INPUTS * BITS[code] // 8
    if code is Code.FP8:  # as weights are distributed: few numbers are tiny
        codes = (torch.randn(OUTPUTS, size) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(0, 120, (OUTPUTS, size), dtype=torch.uint8)
        codes = codes.view(torch.int8) if code is Code.INT8 else codes
    scales = torch.randint(100, 120, (OUTPUTS, groups), dtype=torch.uint8)
    scales = scales.view(scale) if scale.itemsize == 1 else (scales / 1e5).to(scale)
    zero = torch.full((OUTPUTS, groups), 7, dtype=torch.int8) if zeros else None
    return Coded(code, codes, scales, INPUTS, group, zero=zero)


def gguf(code: Code, group: int, *, steps: bool = False, offset: bool = False, exact: bool = False) -> Coded:
    """A weight in llama.cpp's blocks with random codes; `exact` leaves rows in bfloat16."""
    weight = coded(code, group, torch.int8 if steps else torch.float16)
    groups = INPUTS // group
    step = torch.full((OUTPUTS, INPUTS // 256), 1e-3, dtype=torch.float16) if steps else None
    offsets = torch.randint(0, 64, (OUTPUTS, groups), dtype=torch.int8) if offset else None
    return replace(weight, step=step, offset=offsets, offset_step=step if offset else None, block_rows=not exact)


BLOCKS = {
    "q4_0": partial(gguf, Code.INT4, 32),
    "q4_k": partial(gguf, Code.INT4, 32, steps=True, offset=True),
    "q5_k": partial(gguf, Code.INT5, 32, steps=True, offset=True),
    "q6_k": partial(gguf, Code.INT6, 16, steps=True),
    "q8_0": partial(gguf, Code.INT8, 32),
}
FOREIGN = {
    **BLOCKS,
    **{f"{name} exact": partial(make, exact=True) for name, make in BLOCKS.items()},
    "fp8": lambda: coded(Code.FP8, INPUTS, torch.float32),
    "fp8 blocks": lambda: coded(Code.FP8, 128, torch.float32),
    "nvfp4": lambda: coded(Code.FP4, 16, torch.float8_e4m3fn),
    "mxfp4": lambda: coded(Code.FP4, 32, torch.float8_e8m0fnu),
    "awq": lambda: coded(Code.INT4, 128, torch.float16, zeros=True),
    "w4a16 g32": lambda: coded(Code.INT4, 32, torch.bfloat16),
    "w8a16": lambda: coded(Code.INT8, INPUTS, torch.bfloat16),
}


def copies(weight: PackedWeight) -> list[PackedWeight]:
    """As many weights of the same content as one pass reads."""
    found = [weight]
    while sum(each.nbytes for each in found) < BYTES:
        kept = tuple(settled(tensor) for tensor in weight.kept)
        pointers = [tensor.data_ptr() for tensor in kept] + [None]
        same = type(weight.weight)()
        for name, _ in weight.weight._fields_:
            setattr(same, name, getattr(weight.weight, name))
        same.data, same.scale = pointers[0], pointers[1]
        found.append(PackedWeight(same, kept))
    return found


def ours(kernels: Library, name: str) -> tuple[Pass, int]:
    """A pass of a compiled kernel, and the bytes that it reads."""
    weight = (torch.randn(OUTPUTS, INPUTS) * 0.05).bfloat16()
    if name in FOREIGN:
        packed = FOREIGN[name]().pack(None)
    else:
        rule = FORMATS.get(name)
        packed = pack_bfloat16(weight, None) if rule is None else rule.pack(weight, None)
    weights = copies(packed)

    def run(rows: Tensor) -> None:
        for each in weights:
            kernels.linear(each, rows, torch.bfloat16)

    return run, sum(each.nbytes for each in weights)


def torchs(name: str) -> tuple[Pass, int]:
    """A pass of the nearest that torch has: oneDNN prepacked, int8pack, int4pack with groups of 32."""
    weight = (torch.randn(OUTPUTS, INPUTS) * 0.05).bfloat16()
    if name == "bfloat16":
        weights = [torch.ops.mkldnn._reorder_linear_weight(weight) for _ in range(BYTES // weight.nbytes)]
        size = weight.nbytes * len(weights)

        def product(rows: Tensor, each: Tensor) -> None:
            torch.ops.mkldnn._linear_pointwise(rows, each, None, "none", [], "")
    elif name == "int8":
        values = torch.randint(-127, 127, (OUTPUTS, INPUTS), dtype=torch.int8)
        scale = torch.ones(OUTPUTS, dtype=torch.bfloat16)
        weights = [values.clone() for _ in range(BYTES // values.nbytes)]
        size = values.nbytes * len(weights)

        def product(rows: Tensor, each: Tensor) -> None:
            torch._weight_int8pack_mm(rows, each, scale)
    else:
        nibbles = torch.randint(0, 15, (OUTPUTS, INPUTS), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
        scale = torch.ones(INPUTS // 32, OUTPUTS, 2, dtype=torch.bfloat16)
        weights = [packed.clone() for _ in range(BYTES // (packed.nbytes + scale.nbytes))]
        size = (packed.nbytes + scale.nbytes) * len(weights)

        def product(rows: Tensor, each: Tensor) -> None:
            torch.ops.aten._weight_int4pack_mm_for_cpu(rows, each, 32, scale)

    def run(rows: Tensor) -> None:
        for each in weights:
            product(rows, each)

    return run, size


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def foreign() -> float:
    """Seconds of processor time that other processes have used so far."""
    machine, own = busy()
    return machine - own


def chosen(title: str, only: str) -> bool:
    """Whether a title begins with one of the beginnings, separated by commas."""
    return title.startswith(tuple(only.split(",")))


def makers(only: str) -> dict[str, Maker]:
    """What makes each kernel's weights, by the kernel's title."""
    found: dict[str, Maker] = {}
    for variant in VARIANTS:
        file = file_of(variant)
        if file is not None and VARIANTS[variant] <= processor_features():
            kernels = Library(variant, file)
            names = ["bfloat16", *FORMATS] if variant == "avx512" else ["bfloat16", "int8", "int4"]
            names += FOREIGN
            named = {f"{variant} {name}": name for name in names}
            found |= {title: partial(ours, kernels, name) for title, name in named.items() if chosen(title, only)}
    rest = (name for name in ("bfloat16", "int8", "int4") if chosen(f"torch {name}", only))
    return found | {f"torch {name}": partial(torchs, name) for name in rest}


def turn(make: Maker, heights: list[int], probe: Tensor) -> tuple[float, dict[int, float]]:
    """GB/s of the probe and of one kernel by rows, side by side: memory's speed drifts from second to second."""
    run, size = make()
    limit = PROBE / min(timed(probe.sum) for _ in range(3)) / 1e9
    speeds = {}
    for rows in heights:
        x = torch.randn(rows, INPUTS).bfloat16()
        speeds[rows] = size / min(timed(partial(run, x)) for _ in range(2)) / 1e9
    return limit, speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,2,4,5,8,16")
    parser.add_argument("--only", default="", help="kernels whose name begins with one of these, separated by commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heights = [int(part) for part in options.rows.split(",")]
    probe = torch.ones(PROBE // 8, dtype=torch.int64)
    every = makers(options.only)
    speeds: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in heights} for name in every}
    shares: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in heights} for name in every}
    probes, loads = [], []
    with torch.inference_mode():
        for _ in range(options.rounds):
            before, began = foreign(), time.perf_counter()
            for name, make in every.items():
                limit, found = turn(make, heights, probe)
                probes.append(limit)
                for rows, speed in found.items():
                    speeds[name][rows].append(speed)
                    shares[name][rows].append(speed / limit)
            loads.append((foreign() - before) / (time.perf_counter() - began))
    span = f"{statistics.median(probes):.1f} GB/s ({min(probes):.1f} to {max(probes):.1f})"
    print(f"probe {span}, {options.threads} threads, foreign load {max(loads):.2f} cores at most")
    print("| kernel | " + " | ".join(f"{rows} rows" for rows in heights) + " |\n|---|" + "---|" * len(heights))
    for name, found in speeds.items():
        cells = [f"{statistics.median(found[r]):.1f} ({statistics.median(shares[name][r]):.0%})" for r in heights]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if options.out is not None:
        record = {
            "platform": platform.platform(), "torch": torch.__version__, "threads": options.threads,
            "shape": [OUTPUTS, INPUTS], "foreign_cores": loads, "probe_gb_s": probes, "gb_s": speeds, "share": shares,
        }  # fmt: skip
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernels.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
