"""Compiles every kernel for a GPU that need not be there, to a cubin; run as a program, with the interpreter off."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sametoken.kernels.triton import attention, draw, pointwise

TARGET = GPUTarget("cuda", 90, 32)
SCALARS = {"scale": "fp32", "cap": "fp32"} | dict.fromkeys(attention.SIZES, "i32")
SCALARS |= dict.fromkeys(["vocabulary", "splits", "stride", "heads", "width"], "i32")
POINTERS = {"straight": "*i32", "peaks": "*fp32", "totals": "*fp32", "outs": "*fp32", "bests": "*fp32"}
POINTERS |= {"costs": "*fp32", "winners": "*i32", "temperatures": "*fp32", "noise_scale": "*fp32"}
POINTERS |= {"key_scales": "*fp32", "value_scales": "*fp32"}
STORED = ({}, dict.fromkeys(("keys", "values"), "*i8"), dict.fromkeys(("keys", "values"), "*u8"))  # by CODES
INTEGERS = ("rows", "starts", "depths", "paths", "table", "seeds", "positions")


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_SHARED = 232448  # bytes that a block may have on sm_90


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], **options: Any) -> int:
    """Bytes of the cubin; tensors that are nothing special hold `dtype`.

    Pointers are multiples of 16, as torch's are: that decides the width of loads and whether they are pipelined.

    Raises:
        AssertionError: the kernel takes more shared memory than there is, or registers are spilled.
    """
    kinds = dict.fromkeys(INTEGERS, "*i64") | POINTERS | SCALARS | STORED[constants.get("CODES", 0)]
    signature = {n: "constexpr" if n in constants else kinds.get(n, f"*{dtype}") for n in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(
        kernel, signature, constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()}, attrs=attributes
    )
    found = triton.compile(source, target=TARGET, options=options)
    what = kernel.__name__, dtype, constants
    assert found.metadata.shared <= MOST_SHARED, (what, found.metadata.shared)
    used = usage(found.asm["cubin"])
    # float32 is for comparisons; no model is served in it on a GPU.
    assert used["STACK"] == 0 or dtype == "fp32", (what, used)
    worst[kernel.__name__, dtype] = tuple(map(max, worst.get((kernel.__name__, dtype), (0, 0, 0)), (
        used["REG"], found.metadata.shared, used["STACK"])))  # fmt: skip
    return len(found.asm["cubin"])


worst: dict[tuple[str, str], tuple[int, ...]] = {}  # registers, shared memory and stack, the most of each


def usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump prints of a kernel: REG, STACK (bytes of spills and local arrays) and others."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", printed)}


def main() -> None:
    for dtype in DTYPES:
        for size, window, group in ((64, 0, 4), (96, 128, 1), (128, 0, 4), (128, 512, 8), (128, 0, 7), (256, 0, 5)):
            shape = {"SIZE": size, "PADDED": triton.next_power_of_2(size), "WINDOW": window}
            blocks = {"BLOCK": attention.BLOCK, "CHUNK": attention.CHUNK, "ROWS": attention.TILE_ROWS}
            heads = {"KV_HEADS": 8, "GROUP": group, "PAGE": 32}
            for codes in range(len(STORED)):
                chunk = {**heads, **shape, **blocks, "CODES": codes, "CAPPED": codes == 0}
                launch = attention.launch(DTYPES[dtype], shape["PADDED"], codes)
                assert compiled(attention._chunk, dtype, chunk, enable_fp_fusion=False, **launch)
            joined = {"HEADS": 8 * group, "CHUNK": attention.CHUNK, **shape}
            assert compiled(attention._join, dtype, joined, num_warps=1, enable_fp_fusion=False)
            rotated = {"SIZE": size, "DIM": size, "PADDED": triton.next_power_of_2(size), "INTERLEAVED": window > 0}
            assert compiled(pointwise._rotate, dtype, rotated, num_warps=1, enable_fp_fusion=False)
        assert compiled(pointwise._silu_gated, dtype, {"BLOCK": pointwise.BLOCK}, enable_fp_fusion=False)
        split = {"BLOCK": draw.BLOCK, "SPLIT": draw.SPLIT}
        assert compiled(draw._best, dtype, split, enable_fp_fusion=False)
        for noisy in (True, False):
            kind = {"SPLITS": 16, "NOISY": noisy, "TEMPERED": noisy, "MIXED": noisy}
            assert compiled(draw._race, dtype, {**split, **kind}, enable_fp_fusion=False)
    for (name, dtype), (registers, shared, stack) in worst.items():
        print(f"{name} {dtype}: at most {registers} registers, {shared} bytes of shared memory, {stack} bytes of stack")


if __name__ == "__main__":
    main()
