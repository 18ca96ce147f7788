"""Compiles every kernel for a GPU that need not be there, to a cubin; run as a program, with the interpreter off."""

from __future__ import annotations

from typing import Any

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


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], **options: Any) -> int:
    """Bytes of the cubin; tensors that are nothing special hold `dtype`."""
    kinds = dict.fromkeys(INTEGERS, "*i64") | POINTERS | SCALARS | STORED[constants.get("CODES", 0)]
    signature = {n: "constexpr" if n in constants else kinds.get(n, f"*{dtype}") for n in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()})
    return len(triton.compile(source, target=TARGET, options=options).asm["cubin"])


def main() -> None:
    for dtype in ("bf16", "fp16", "fp32"):
        for size, window, group in ((64, 0, 4), (96, 128, 1), (128, 0, 4), (128, 512, 8)):
            shape = {"SIZE": size, "PADDED": triton.next_power_of_2(size), "WINDOW": window}
            blocks = {"BLOCK": attention.BLOCK, "CHUNK": attention.CHUNK, "ROWS": attention.TILE_ROWS}
            heads = {"KV_HEADS": 8, "GROUP": group, "PAGE": 32}
            for codes in range(len(STORED)):
                chunk = {**heads, **shape, **blocks, "CODES": codes, "CAPPED": codes == 0}
                assert compiled(attention._chunk, dtype, chunk, num_warps=4, enable_fp_fusion=False)
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
    print("compiled")


if __name__ == "__main__":
    main()
