"""What both training runs share: windows of tokens, optimisers, a schedule by the clock, gradients averaged by gloo.

One single-threaded process per core keeps each GEMM on one core, so other work on the machine slows a step instead of
stalling every OpenMP barrier.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaForCausalLM

SEQUENCE = 512


def start() -> tuple[int, int]:
    """Joins the process group if torchrun started us; returns rank and world size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def batches(tokens: np.ndarray, rows: int, seed: int) -> Iterator[Tensor]:
    """Endless [rows, SEQUENCE + 1] windows at random offsets."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - SEQUENCE - 1, rows)
        yield torch.from_numpy(np.stack([tokens[s : s + SEQUENCE + 1] for s in starts]).astype(np.int64))


def windows(tokens: np.ndarray, count: int) -> Iterator[Tensor]:
    """`count` evenly spaced [1, SEQUENCE + 1] windows."""
    for start in np.linspace(0, len(tokens) - SEQUENCE - 1, count).astype(int):
        yield torch.from_numpy(tokens[start : start + SEQUENCE + 1].astype(np.int64))[None]


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def average_gradients(model: nn.Module) -> None:
    if dist.is_initialized():
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, piece in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad.copy_(piece.view_as(p))


def schedule(done: float) -> float:
    """Warm up over 2 %, hold, then anneal linearly to zero over the last half."""
    return min(done / 0.02, 1.0, max(0.0, (1.0 - done) / 0.5))


class Clock:
    """The share of `minutes` that is over, as rank 0 sees it: every rank must anneal alike."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self.begin = minutes, time.time()

    def done(self) -> float:
        share = torch.tensor((time.time() - self.begin) / (60 * self.minutes))
        if dist.is_initialized():
            dist.broadcast(share, 0)
        return float(share)


def fit(
    model: LlamaForCausalLM,
    data: Iterator[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    evaluate: Callable[[], dict[str, float]],
    directory: Path,
    *,
    minutes: float,
    rate: float,
) -> None:
    """Trains until the clock runs out; rank 0 logs to `directory`.jsonl and saves to `directory`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    opts, clock, seen = optimizers(model, rate), Clock(minutes), 0
    with open(directory.with_suffix(".jsonl"), "w", encoding="utf-8") as log:
        for step, window in enumerate(data):
            done = clock.done()
            if done >= 1:
                break
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = rate * schedule(done)
            loss = loss_of(window)
            loss.backward()
            average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad()
            seen += window.shape[0] * SEQUENCE * world
            if rank == 0 and step % 10 == 0:
                row = {"step": step, "tokens": seen, "minutes": round(minutes * done, 2), "loss": round(loss.item(), 4)}
                print(json.dumps(row | (evaluate() if step % 100 == 0 else {})), file=log, flush=True)
            if rank == 0 and step % 200 == 199:
                save(model, directory)
        if rank == 0:
            print(json.dumps({"step": step, "tokens": seen, "minutes": minutes} | evaluate()), file=log)
            save(model, directory)


def save(model: LlamaForCausalLM, directory: Path) -> None:
    """Writes bfloat16 weights in the Hugging Face layout, the tied head left out."""
    state = {n: p.detach().to(torch.bfloat16) for n, p in model.state_dict().items() if n != "lm_head.weight"}
    model.save_pretrained(directory, state_dict=state)
    path = directory / "config.json"  # which states the dtype of the master weights, not of the file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}, indent=2) + "\n")
