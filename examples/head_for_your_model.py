"""Train an EAGLE-3 head for a model, from no data to a measured speed-up, with the commands that a shell would run.

    python examples/head_for_your_model.py [MODEL] [--conversations N] [--steps N]

The model itself writes the conversations, so no data set is needed. Files go to the directory head-for-your-model.
Needs pip install 'sametoken[server,train]'.
"""

import argparse
import subprocess
import sys
from pathlib import Path

OUT = Path("head-for-your-model")


def sametoken(*arguments: str) -> None:
    """Runs a command of sametoken as a shell would; ends this program if the command fails."""
    print("$ sametoken", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "sametoken.cli", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--conversations", type=int, default=2000, help="for training; a twentieth more is held out")
    parser.add_argument("--steps", type=int, help="of training; without it: sametoken chooses from the data")
    given = parser.parse_args()
    data, held_out = str(OUT / "answers.jsonl"), str(OUT / "held-out.jsonl")
    OUT.mkdir(exist_ok=True)

    said = ("--temperature", "0.7", "--max-tokens", "128")
    sametoken("synthesize", given.model, "--self-prompts", str(given.conversations), *said, "--output", data)
    number = str(max(2, given.conversations // 20))
    sametoken("synthesize", given.model, "--self-prompts", number, "--seed", "1", "--exclude", data, *said,
              "--output", held_out)  # fmt: skip
    steps = () if given.steps is None else ("--max-steps", str(given.steps))
    sametoken("train", given.model, "--data", data, "--eval-data", held_out, "--output-dir", str(OUT / "run"), *steps)
    sametoken("evaluate", str(OUT / "run" / "head"), "--target", given.model, "--data", held_out)
    sametoken("verify", given.model, "--draft", str(OUT / "run" / "head"), "--num-prompts", "2", "--max-tokens", "32")


if __name__ == "__main__":
    main()
