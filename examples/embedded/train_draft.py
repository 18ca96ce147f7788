"""Distils the embedded draft from the target: forward KL on the training text, over the whole vocabulary.

    torchrun --standalone --nproc-per-node 2 train_draft.py --work DIR --minutes 15

A draft is worth what the target accepts, so held-out agreement is logged beside the loss: how often the draft's first
choice is the target's, which is the acceptance of one greedy token, and the overlap sum(min(p, q)).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from common import batches, fit, start, windows
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def draft_config(target: LlamaConfig, layers: int) -> LlamaConfig:
    """The target's vocabulary and context in one or two small layers."""
    config = LlamaConfig.from_dict(target.to_dict())
    config.update(
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    return config


def start_from(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """The draft's embedding begins as the principal directions of the target's."""
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight.float()
        u, s, _ = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
        size = draft.config.hidden_size
        start = u[:, :size] * s[:size]
        draft.model.embed_tokens.weight.copy_(start / start.std() * 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory with train.npy, held_out.npy and target/")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--rows", type=int, default=12, help="sequences a step and process")
    parser.add_argument("--rate", type=float, default=6e-3)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--go-on", action="store_true", help="start from WORK/draft instead of anew")
    args = parser.parse_args()

    rank, _ = start()
    target = LlamaForCausalLM.from_pretrained(args.work / "target", dtype=torch.float32).eval()
    if args.go_on:
        draft = LlamaForCausalLM.from_pretrained(args.work / "draft", dtype=torch.float32).train()
    else:
        draft = LlamaForCausalLM(draft_config(target.config, args.layers)).float().train()
        start_from(target, draft)
    train, held_out = np.load(args.work / "train.npy"), np.load(args.work / "held_out.npy")

    def log_probs(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        return logits.float().log_softmax(-1)

    def loss_of(window: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = log_probs(target, window[:, :-1])
        return (wanted.exp() * (wanted - log_probs(draft, window[:, :-1]))).sum(-1).mean()

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        pairs = [(log_probs(target, w[:, :-1]), log_probs(draft, w[:, :-1])) for w in windows(held_out, 8)]
        agree = torch.cat([(p.argmax(-1) == q.argmax(-1)).flatten() for p, q in pairs]).float().mean()
        overlap = torch.cat([torch.minimum(p.exp(), q.exp()).sum(-1).flatten() for p, q in pairs]).mean()
        return {"agreement": round(float(agree), 4), "overlap": round(float(overlap), 4)}

    data = batches(train, args.rows, seed=100 + rank)
    fit(draft, data, loss_of, evaluate, args.work / "draft", minutes=args.minutes, rate=args.rate)


if __name__ == "__main__":
    main()
