"""Answers of the target to prompts of `prompts.py`, a third of them at temperature 0.7, some with a second turn.

    python answers.py --prompts WORK/prompts.jsonl --target smollm2 --out WORK/answers.jsonl

A file that exists is continued.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from sametoken import LLM, SamplingParams

PART = 288  # conversations that are written together
NEXT = (
    "Can you give me an example?", "Explain that in simpler terms.", "Thanks! What else should I know?",
    "Can you make it shorter?", "Why is that?", "Now rewrite your answer as a list.",
    "Could you write it in a more formal tone?", "Are there any exceptions?", "Tell me more about the last point.",
    "Is that correct? Please check your answer.", "Translate your answer to plain English for a child.",
    "Can you write code for it?",
)  # fmt: skip


def answered(llm: LLM, prompts: list[str], seed: int) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)
    draws = [
        SamplingParams(temperature=0.7 if rng.random() < 1 / 3 else 0.0, max_tokens=280, seed=rng.randrange(2**31))
        for _ in prompts
    ]
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    going = list(range(len(talks)))
    for last in (False, True):
        made = llm.chat([talks[at] for at in going], [draws[at] for at in going])
        for at, each in zip(going, made, strict=True):
            talks[at].append({"role": "assistant", "content": each.text})
        going = [
            at for at, each in zip(going, made, strict=True) if each.finish_reason == "stop" and rng.random() < 0.25
        ]
        for at in [] if last else going:
            talks[at].append({"role": "user", "content": rng.choice(NEXT)})
    return talks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    done = set[str]()
    if given.out.exists():
        done = {json.loads(line)["id"] for line in given.out.read_text(encoding="utf-8").splitlines()}
    todo = [line for line in lines if line["id"] not in done]
    llm = LLM(given.target, speculative={"method": "none"}, max_batch_size=48, max_seq_len=1536)
    with given.out.open("a", encoding="utf-8") as file:
        for first in range(0, len(todo), PART):
            part = todo[first : first + PART]
            talks = answered(llm, [line["prompt"] for line in part], seed=first)
            pairs = zip(part, talks, strict=True)
            file.writelines(json.dumps({"id": line["id"], "messages": talk}) + "\n" for line, talk in pairs)
            file.flush()


if __name__ == "__main__":
    main()
