"""Memory of each process of a training run, measured and by the arithmetic of `sametoken.train.memory`.

    python benchmarks/train_memory.py --hidden 1024 --layers 16

A random Llama in bfloat16 is the target; an eagle3 draft is trained for two steps by two processes. Measured is the
largest anonymous memory of a process (RssAnon of Linux), less that of a process that trains for a tiny target.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from sametoken import embedded
from sametoken.checkpoint.hub import read_config
from sametoken.model.config import ModelConfig
from sametoken.train.memory import training_memory

ROW = 128  # tokens of a forward
MODES = {"online": (), "sharded": ("--fsdp-target",), "sharded, draft too": ("--fsdp-target", "--fsdp")}


def make_target(place: Path, hidden: int, layers: int) -> None:
    """A random target with the embedded model's tokenizer."""
    source = embedded.target(embedded.NAME)
    vocabulary = ModelConfig.from_hf(read_config(Path(source))).vocab_size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=512,
        dtype="bfloat16", bos_token_id=None, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
    for file in Path(source).glob("*"):
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens", "generation")):
            (place / file.name).write_bytes(file.read_bytes())


def anonymous(process: int) -> int:
    """Bytes of a process that no file has."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def measure(target: Path, data: Path, output: Path, *options: str) -> int:
    """The largest anonymous memory of a worker of a run of two processes."""
    command = [sys.executable, "-m", "sametoken.cli", "train", str(target), "--data", str(data), "--optim", "adamw"]
    command += ["--max-steps", "2", "--num-epochs", "9", "--training-seq-len", str(ROW), "--train-bs", "1"]
    command += ["--ttt-steps", "1", "--num-gpu", "2", "--output-dir", str(output), *options]
    started, most = subprocess.Popen(command, stderr=subprocess.PIPE, text=True), 0
    while started.poll() is None:
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        most = max([most, *(anonymous(int(each)) for each in children)])
        time.sleep(0.02)
    if started.returncode:
        raise SystemExit(started.stderr.read() if started.stderr else "failed")
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data = root / "chat.jsonl"
        turns = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "Once upon a time " * 20}]
        data.write_text("".join(json.dumps({"id": i, "messages": turns}) + "\n" for i in range(8)))
        make_target(root / "target", given.hidden, given.layers)
        make_target(root / "small", 128, 7)
        base = measure(root / "small", data, root / "base")
        config = ModelConfig.from_hf(read_config(root / "target"))
        print(f"target: {config.parameters:,} weights in bfloat16, two processes on one host; GB of a process\n")
        print("| | measured | arithmetic |\n|---|---|---|")
        for number, (mode, options) in enumerate(MODES.items()):
            output = root / f"out-{number}"
            found = measure(root / "target", data, output, *options) - base
            with safe_open(output / "checkpoint-2" / "model.safetensors", "pt") as kept:
                draft = sum(kept.get_tensor(key).numel() for key in kept.keys())  # noqa: SIM118
            kind = "online" if mode == "online" else "sharded"
            wanted = training_memory(config, draft, kind, 2, fsdp="--fsdp" in options, tokens=ROW)
            print(f"| {mode} | {found / 1e9:.2f} | {wanted.total / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()
