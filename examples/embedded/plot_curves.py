"""Draws the loss curves of the two training runs from their logs into one PNG. Needs matplotlib."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(log: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def curve(axis: plt.Axes, rows: list[dict[str, float]], key: str, label: str) -> None:
    points = [(row["tokens"] / 1e6, row[key]) for row in rows if key in row and "tokens" in row]
    axis.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 40 else None, markersize=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="directory with target.jsonl and draft.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    target, draft = read(args.logs / "target.jsonl"), read(args.logs / "draft.jsonl")
    curve(left, target, "loss", "training")
    curve(left, target, "held_out_loss", "held out")
    left.set(title="target: cross-entropy", xlabel="million tokens", ylabel="nats a token")
    curve(right, draft, "agreement", "first choice agrees")
    curve(right, draft, "overlap", "overlap sum(min(p, q))")
    right.set(title="draft: held-out agreement with the target", xlabel="million tokens")
    for axis in (left, right):
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
