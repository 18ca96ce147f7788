"""Runs in speculators' environment: loads heads, or converts them first, and saves the logits of its own forward.

    python speculators_logits.py JOBS.json OUT.json

A job is {"name", "head", "states", "verifier", "convert": null or the converter's options, "out"}. `states` is a
safetensors file with the tokens and the output of every block; the blocks are chosen by the ids of the loaded head.
OUT.json says per job "ok", or the error.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.convert import convert_model
from speculators.models.eagle3 import Eagle3SpeculatorConfig

STEPS = 4


def logits(head: Path, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits of every unrolled step; row i of step k guesses token i + 2 + k."""
    config = Eagle3SpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention is compiled, which takes minutes
    model = SpeculatorModel.from_pretrained(head, config=config).float().eval()
    with safe_open(head / "model.safetensors", "pt") as file:
        if "embed_tokens.weight" not in set(file.keys()):
            # It takes the verifier's vectors if its own are NaN, but with transformers 5 they are unset memory instead.
            model.embed_tokens.weight.data.fill_(torch.nan)
            model.load_verifier_weights()
    ids = model.target_layer_ids  # counted before a block; 0 is the embedding
    hidden = torch.cat([states["blocks"][i - 1] for i in ids], dim=-1)
    tokens = states["tokens"]
    captured: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda m, i, o: captured.append(o.detach()))
    rows = tokens.shape[1] - 1  # its training data pairs the state of a position with the next token
    with torch.no_grad():
        model(
            hidden_states=hidden[:, :-1],
            input_ids=tokens[:, 1:],
            document_ids=torch.zeros(1, rows, dtype=torch.long),
            position_ids=torch.arange(rows)[None],
            ttt_steps=STEPS,
        )
    hook.remove()
    found = {f"logits.{k}": step[:, : rows - k].contiguous() for k, step in enumerate(captured)}
    if model.d2t is not None:
        found["d2t"] = model.d2t.clone()
    return found


def run(job: dict[str, Any]) -> None:
    head = Path(job["head"])
    if job["convert"] is not None:
        converted = Path(job["out"]).with_suffix(".converted")
        convert_model(
            model=str(head), verifier=job["verifier"], output_path=str(converted), algorithm="eagle3", **job["convert"]
        )
        head = converted
    save_file(logits(head, load_file(job["states"])), job["out"])


def main(jobs: Path, out: Path) -> None:
    torch.set_num_threads(1)
    outcomes: dict[str, str] = {}
    for job in json.loads(jobs.read_text()):
        try:
            run(job)
        except Exception as error:  # what a peer refuses is a result, and the other jobs go on
            outcomes[job["name"]] = f"{type(error).__name__}: {error}"[:300]
        else:
            outcomes[job["name"]] = "ok"
        print(job["name"], outcomes[job["name"]], flush=True)
    versions = {name: version(name) for name in ("speculators", "torch", "transformers")}
    out.write_text(json.dumps({"versions": versions, "cases": outcomes}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
