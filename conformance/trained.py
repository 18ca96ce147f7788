"""Heads for the embedded target, trained for some minutes each by `sametoken train` on what the target itself says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sametoken import LLM, SamplingParams
from sametoken.embedded import NAME
from sametoken.prompts.sources import BUILT_IN, as_turn

SHORT = ["--max_steps", "150", "--num_epochs", "20", "--optim", "muon", "--lr", "5e-3", "--training_seq_len", "512",
         "--train_bs", "2"]  # fmt: skip
REDUCED = ["--mode", "eagle3", "--ttt_steps", "4", "--draft_vocab_size", "1024", "--fill_vocabulary", "--no-fc-norm",
           "--no-norm-output"]  # fmt: skip
# Options of `sametoken train` and the method that vLLM has to be told.
RECIPES: dict[str, tuple[list[str], str]] = {
    "EAGLE-3": (REDUCED, "eagle3"),
    "EAGLE-3, other taps": ([*REDUCED, "--taps", "0,5,14"], "eagle3"),
    "EAGLE-3, four taps": ([*REDUCED, "--taps", "0,4,9,14"], "eagle3"),
    "EAGLE-3, norm_before_residual": ([*REDUCED, "--norm_before_residual"], "eagle3"),
    "EAGLE-3, two blocks": ([*REDUCED, "--eagle_num_layers", "2"], "eagle3"),
    "EAGLE-3, window of 16": ([*REDUCED, "--draft_window", "16"], "eagle3"),
    "EAGLE 3.1": (["--mode", "eagle3", "--ttt_steps", "4", "--fc_norm", "--norm_output"], "eagle3"),
    "EAGLE-1": (["--mode", "eagle1"], "eagle"),
    "Medusa": (["--mode", "medusa", "--medusa_num_heads", "4"], "medusa"),
}


def trained_heads(work: Path) -> dict[str, Path]:
    """Directories of heads by name; each is trained if it is not there."""
    return {name: _trained(name, options, work / "trained") for name, (options, _) in RECIPES.items()}


def method(name: str) -> str:
    """What vLLM calls the kind of a head."""
    return RECIPES[name][1]


def _trained(name: str, options: list[str], work: Path) -> Path:
    out = work / slug(name)
    if not (out / "head" / "config.json").exists():
        print(f"training {name}", flush=True)
        command = [sys.executable, "-m", "sametoken.cli", "train", NAME, "--data", str(conversations(work)), *SHORT]
        with (work / f"{out.name}.log").open("w") as log:
            subprocess.run([*command, *options, "--output_dir", str(out)], check=True, stderr=log, stdout=log)
    return out / "head"


def slug(name: str) -> str:
    """The name of a head as that of a directory."""
    return name.lower().replace(",", "").replace(" ", "-")


def conversations(work: Path) -> Path:
    """Built-in prompts answered by the target, eight times each, as training reads them."""
    file = work / "conversations.jsonl"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        llm = LLM(NAME)
        turns = [as_turn(turn) for turn in BUILT_IN]
        lines: list[str] = []
        for seed in range(8):
            params = SamplingParams(temperature=0.7, seed=seed, max_tokens=160)
            for turn, answer in zip(turns, llm.chat([list(turn.messages) for turn in turns], params), strict=True):
                said = [*turn.messages, {"role": "assistant", "content": answer.text}]
                lines.append(json.dumps({"conversation_id": len(lines), "conversations": said}))
        file.write_text("\n".join(lines) + "\n")
    return file
