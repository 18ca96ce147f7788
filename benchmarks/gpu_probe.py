"""Facts of one card that decide the design of steps on CUDA: products of few rows and the draw.

    python benchmarks/gpu_probe.py        # a line of JSON for each fact; needs CUDA, no model and no network

For each weight of a Llama 3.1 8B and each setting of the library: which row counts give the bits of 64 rows, and how
long a product takes. Settings: the default, and cuBLASLt without split-K.
"""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count as count_up
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.options.sampling import SamplingParams
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import Draft, ancestors, chain_parents
from sametoken.speculation.sampling import RowSampling, Sampling, sample

WEIGHTS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
COUNTS = (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 320)
VOCABULARY = 128256


def say(**facts: Any) -> None:
    print(json.dumps({name: round(x, 2) if isinstance(x, float) else x for name, x in facts.items()}), flush=True)


def microseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """Median device time of `work` in a captured graph of `repeats` calls, so that launches cost little."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / repeats)
    return statistics.median(times)


def products(setting: str) -> None:
    """Bits of the first row over row counts, and times; weights are read from memory, not from the cache."""
    for name, (outs, ins) in WEIGHTS.items():
        copies = max(1, 2**28 // (2 * outs * ins))  # more than the L2 cache holds
        weights = [torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(copies)]
        x = torch.randn(max(COUNTS), ins, device="cuda", dtype=torch.bfloat16)
        truth = F.linear(x[:64], weights[0])
        same, times = {}, {}
        for count in COUNTS:
            shared = min(count, 64)
            same[count] = int(torch.equal(F.linear(x[:count], weights[0])[:shared], truth[:shared]))
        for count in (1, 5, 16, 64, 320):
            turn = count_up()
            times[count] = microseconds(partial(_product, x[:count], weights, turn))
        order = torch.randperm(64, device="cuda")
        moved = torch.equal(F.linear(x[:64][order], weights[0]), truth[order])
        floor = 2 * outs * ins
        say(
            probe="product", setting=setting, weight=name, as_64_rows=same, permuted_64=moved, us=times,
            gb_per_s={count: round(floor / t / 1e3) for count, t in times.items()},
        )  # fmt: skip


def _product(x: Tensor, weights: list[Tensor], turn: Iterator[int]) -> Tensor:
    return F.linear(x, weights[next(turn) % len(weights)])


def draws() -> None:
    """Draws by Triton and by torch over a large vocabulary."""
    for temperature in (0.0, 0.8, 1.0):
        wrong = 0
        for seed in range(4):
            scores = 3 * torch.randn(2, 200, VOCABULARY, device="cuda").bfloat16()
            rows = [
                RowSampling(SamplingParams(temperature=temperature), seed + i, [1], VOCABULARY, device="cuda")
                for i in range(2)
            ]
            parents = chain_parents(2, 200, "cuda")
            asked = (
                scores,
                Draft(torch.zeros_like(parents), parents),
                ancestors(parents),
                torch.tensor([3, 9], device="cuda"),
            )
            wrong += int((draw(*asked, Sampling.of(rows)) != sample(*asked, Sampling.of(rows))).sum())
        say(probe="draw", temperature=temperature, draws=1600, different=wrong)
    for nodes in (1, 5):
        for batch in (1, 64):
            scores = torch.randn(batch, nodes, VOCABULARY, device="cuda").bfloat16()
            for what, options in (
                ("plain", {}),
                ("top_p", {"top_p": 0.9}),
                ("top_k", {"top_k": 20}),
                ("greedy", {"temperature": 0.0}),
            ):
                rows = [RowSampling(SamplingParams(**options), i, [1], VOCABULARY, device="cuda") for i in range(batch)]
                parents, sampling = chain_parents(batch, nodes, "cuda"), Sampling.of(rows)
                at = torch.zeros(batch, dtype=torch.int64, device="cuda")
                draft, mask = Draft(torch.zeros_like(parents), parents), ancestors(parents)
                us = microseconds(lambda a=(scores, draft, mask, at, sampling): draw(*a), 5)
                say(probe="draw", rule=what, batch=batch, nodes=nodes, us=us)


def settings() -> list[tuple[str, Callable[[], None]]]:
    matmul = torch.backends.cuda.matmul

    def lt() -> None:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]

    # cuBLAS itself refuses to leave split-K out.
    return [("default", lambda: None), ("cublaslt, no split-K", lt)]


def main() -> int:
    failed = 0
    with torch.inference_mode():
        for name, choose in settings():
            try:
                choose()
                products(name)
            except Exception:
                failed = 1
                say(probe="product", setting=name, error=traceback.format_exc()[-600:])
        try:
            draws()
        except Exception:
            failed = 1
            say(probe="draw", error=traceback.format_exc()[-600:])
    return failed


if __name__ == "__main__":
    sys.exit(main())
