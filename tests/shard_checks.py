"""What the tests of data generation on Slurm and on Ray share: conversations to cut into shards, and which are done."""

from __future__ import annotations

import json
from pathlib import Path

from sametoken.deploy.shards import done

SHORT = ("--max-tokens", "8", "--num-threads", "2")
SERVE = ("--serve-args", "--max-batch-size 4 --max-seq-len 256 --threads 1")


def words_to_shard(place: Path, count: int) -> tuple[str, ...]:
    """Writes conversations for so many shards of two; the words of `sametoken` that cut them to `place / "shards"`."""
    lines = [
        json.dumps({"conversations": [{"role": "user", "content": f"Tell me about number {number}."}]})
        for number in range(2 * count)
    ]
    file = place / "all.jsonl"
    file.write_text("\n".join(lines))
    return "shard", "--input-path", str(file), "--output-dir", str(place / "shards"), "--max-lines-per-shard", "2"


def complete(answers: Path) -> list[int]:
    """Numbers of the shards that are done."""
    return sorted(int(file.name[7:12]) for file in answers.glob("output-*.jsonl") if done(file))
