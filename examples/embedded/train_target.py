"""Pretrains the embedded target: a small deep Llama on packed tokens, data-parallel over single-thread processes.

    torchrun --standalone --nproc-per-node 2 train_target.py --work DIR --minutes 60

One process per core keeps each GEMM on one core, so other work on the machine slows a step instead of stalling
every OpenMP barrier. The learning rate follows the clock: the run ends, annealed, after `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE = 512


def target_config() -> LlamaConfig:
    """Deep and narrow: the step cost of a large model against a one-layer draft, at 24 MB."""
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )


def batches(tokens: np.ndarray, rows: int, seed: int):
    """Endless [rows, SEQUENCE + 1] windows at random offsets."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - SEQUENCE - 1, rows)
        yield torch.from_numpy(np.stack([tokens[s : s + SEQUENCE + 1] for s in starts]).astype(np.int64))


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: np.ndarray, windows: int = 16) -> float:
    starts = np.linspace(0, len(tokens) - SEQUENCE - 1, windows).astype(int)
    losses = [loss_of(model, torch.from_numpy(tokens[s : s + SEQUENCE + 1].astype(np.int64))[None]) for s in starts]
    return float(torch.stack(losses).mean())


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="directory that prepare_data.py wrote")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rows", type=int, default=8, help="sequences a step and process")
    parser.add_argument("--rate", type=float, default=4e-3)
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(target_config()).float().train()
    model.config.dtype = "bfloat16"
    opts = optimizers(model, args.rate)
    train, held_out = np.load(args.work / "train.npy"), np.load(args.work / "held_out.npy")
    log = open(args.work / "target_loss.jsonl", "w", encoding="utf-8") if rank == 0 else None

    # The annealing needs every rank to agree on the clock, so rank 0's is the one that counts.
    start = torch.tensor(time.time(), dtype=torch.float64)
    done = torch.zeros(())
    for step, window in enumerate(batches(train, args.rows, seed=rank)):
        if rank == 0:
            done.fill_((time.time() - float(start)) / (60 * args.minutes))
        if dist.is_initialized():
            dist.broadcast(done, 0)
        if done >= 1:
            break
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.rate * schedule(float(done))
        loss = loss_of(model, window)
        loss.backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if log and step % 10 == 0:
            row = {"step": step, "tokens": (step + 1) * window.shape[0] * SEQUENCE * (2 if dist.is_initialized() else 1)}
            row |= {"minutes": round(60 * args.minutes * float(done) / 60, 2), "loss": round(loss.item(), 4)}
            if step % 100 == 0:
                row["held_out_loss"] = round(held_out_loss(model, held_out), 4)
            print(json.dumps(row), file=log, flush=True)
        if rank == 0 and step % 200 == 199:
            save(model, args.work / "target")
    if log:
        print(json.dumps({"step": step, "held_out_loss": round(held_out_loss(model, held_out), 4)}), file=log)
        save(model, args.work / "target")


def save(model: LlamaForCausalLM, directory: Path) -> None:
    state = {n: p.detach().to(torch.bfloat16) for n, p in model.state_dict().items() if n != "lm_head.weight"}
    model.save_pretrained(directory, state_dict=state)


if __name__ == "__main__":
    main()
