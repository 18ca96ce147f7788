"""Runs in speculators' environment: one training step of its EAGLE-3 model for every line that it reads.

    python speculators_step.py DIRECTORY STEPS ATTENTION

DIRECTORY holds a head in speculators' layout and the batch; the peer's own model, losses and metrics compute. Says a
line of JSON when it is ready, and one per step with its processor and wall time.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3SpeculatorConfig


def main(place: Path, steps: int, attention: str) -> None:
    torch.set_num_threads(1)
    config = Eagle3SpeculatorConfig.from_pretrained(place / "head")
    config.transformer_layer_config._attn_implementation = attention  # its default is compiled for GPUs
    model = SpeculatorModel.from_pretrained(place / "head", config=config).float()
    batch = load_file(place / "batch.safetensors")
    model.embed_tokens.weight.data.copy_(batch["vectors"])
    model.verifier_lm_head.weight.data.copy_(batch["vectors"])
    model.verifier_norm = torch.nn.Identity()  # the states are normed already
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4)
    # Its data pair the state of a position with the next token; the last position has none.
    inputs = {
        "hidden_states": batch["taps"][:-1].unsqueeze(0), "input_ids": batch["tokens"][1:].unsqueeze(0),
        "document_ids": batch["documents"][:-1].unsqueeze(0), "loss_mask": batch["mask"][1:].unsqueeze(0),
        "position_ids": batch["positions"][:-1].unsqueeze(0),
        "verifier_last_hidden_states": batch["last"][1:].unsqueeze(0),
    }  # fmt: skip
    losses = resolve_loss_config("kl_div", "eager")  # the fused one needs a GPU
    print(json.dumps({"speculators": version("speculators"), "trained": sum(p.numel() for p in trained)}), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = model(**inputs, ttt_steps=steps, ttt_step_loss_decay=0.8, loss_config=losses)
        loss.backward()
        optimiser.step()
        said = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "loss": float(loss.detach())}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
