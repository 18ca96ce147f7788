"""Pretrains the embedded target: a small deep Llama on packed tokens.

    torchrun --standalone --nproc-per-node 2 train_target.py --work DIR --minutes 72

The learning rate follows the clock: the run ends, annealed, after `--minutes`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from common import batches, fit, start, windows
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory that prepare_data.py wrote")
    parser.add_argument("--minutes", type=float, default=72)
    parser.add_argument("--rows", type=int, default=12, help="sequences a step and process")
    parser.add_argument("--rate", type=float, default=4e-3)
    args = parser.parse_args()

    rank, _ = start()
    model = LlamaForCausalLM(target_config()).float().train()
    model.config.dtype = "bfloat16"
    train, held_out = np.load(args.work / "train.npy"), np.load(args.work / "held_out.npy")

    def loss_of(window: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        losses = [loss_of(window) for window in windows(held_out, 16)]
        return {"held_out_loss": round(float(torch.stack(losses).mean()), 4)}

    data = batches(train, args.rows, seed=rank)
    fit(model, data, loss_of, evaluate, args.work / "target", minutes=args.minutes, rate=args.rate)


if __name__ == "__main__":
    main()
