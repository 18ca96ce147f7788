"""Prompts for training a head of SmolLM2-135M-Instruct, and held-out prompts for judging it.

    python prompts.py --data DATA --wordnet /usr/share/wordnet --target smollm2 --out WORK

DATA has the files that README.md lists, in folders chat, text and bench. `WORK/prompts.jsonl` gets an id and a prompt
per line, `WORK/held.jsonl` conversations of one user turn. A prompt that has 13 words in a row in common with MT-bench,
HumanEval, GSM8K's test set or Spec-Bench is left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sametoken import LLM, SamplingParams

GRAM = 13
LONGEST = 3000  # characters of a prompt
TOPICS = """Explain {a} to a beginner.
Write a short story about {a} and {b}.
Write a blog post about {a}.
What is the difference between {a} and {b}?
Give me five tips about {a}.
Compose an email to a colleague about {a}.
Write a poem about {a}.
How does {a} work?
List the advantages and disadvantages of {a}.
Describe the history of {a} in a few paragraphs.
Imagine you are an expert in {a}. What would you tell a child about it?
Pretend to be a famous person who loves {a}. Introduce yourself.
Write a product description for {a}.
What are the main types of {a}?
Create a plan for a week with {a} and {b}.
Write a dialogue between a teacher and a student about {a}.
Can you summarise what is known about {a} in three sentences?
Why is {a} important in daily life?
Write a persuasive speech about {a}.
Give a definition of {a} and use it in three sentences.
What would happen if there were no {a} in the world?
How can I learn more about {a}? Suggest books and exercises.
Write an opening paragraph of a novel in which {a} matters.
I have an interview about {a} tomorrow. Which questions should I expect?
Rewrite this sentence in a friendlier tone: "The {a} has to be done with the {b} by tomorrow."
Compare {a} with {b}: similarities, differences, and an example of each.
Write a travel guide for a place known for its {a}.
Make a table of facts on {a}.
What questions would a scientist ask about {a}?
Write a review of a film about {a} and {b}.
Suggest names for a company that sells {a}.
Is {a} good or bad for people? Argue both sides.
Help me write a letter of complaint about {a}.
Describe a vivid scene with {a}, using all five senses.
Which of these does not belong with the others, and why: {a}, {b}, {c}?
Sort these words into categories: {a}, {b}, {c}, {d}.""".splitlines()
REASONING = """{x} people are in a room and {y} leave. Then {z} times as many come in. How many are there now?
Solve for x: {z}x + {y} = {s}
What is {x} times {y}? Show the steps.
If a train travels {x} km in {z} hours, what is its average speed?
A rectangle has a length of {x} cm and a width of {y} cm. Find its area and its perimeter.
What is the probability of rolling a sum of {z} with two dice?
Find the mean and the median of {x}, {y}, {z} and {s}.
A shop sells a shirt for ${x} with a discount of {z} percent. What do I pay?
If f(x) = {z}x^2 - {y}x + {x}, what is f(3)?
Convert {x} degrees Celsius to Fahrenheit.""".splitlines()
CODE = (
    "Complete this Python function:\n```python\n{head}```",
    "Write a Python function `{name}({arguments})`: {first}",
    "Write a function in Python that does this: {first}",
    "Explain what a function named `{name}` with the arguments {arguments} could do: {first}",
    "Write unit tests for a Python function `{name}`: {first}",
    "Write a {language} function that does this: {first}",
)
LANGUAGES = ("JavaScript", "C++", "Java", "Go", "Rust")
TEXTS = (
    "Summarise this text:\n\n{}",
    "Continue this story:\n\n{}",
    "{}\n\nWho are the characters in this text, and what do they do?",
    "Extract all names and places from this text as JSON:\n\n{}",
    "Rewrite this passage for adults:\n\n{}",
    "Give this text a title and explain your choice.\n\n{}",
    "Correct the grammar of the following text:\n\n{}",
)
# How many prompts of each source, and which of its turns.
CHATS = {"gsm8k_train_chat": (900, 0), "oasst_en_100_trees": (100, 0), "self_dialogue": (200, 0),
         "synthetic_persona_chat": (150, 2)}  # fmt: skip
STORIES = ("pratham_books_en", "african_storybook_en", "fairytaleqa_stories")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OPENING = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1)}


def topics(wordnet: Path, rng: random.Random, count: int) -> Iterator[str]:
    lines = (wordnet / "index.noun").read_text(encoding="ascii").splitlines()
    found = [(line.split()[0].replace("_", " "), int(line.split()[2])) for line in lines if not line.startswith(" ")]
    single = [word for word, senses in found if senses >= 3 and len(word) > 3 and word.isalpha()]
    double = [word for word, _ in found if word.count(" ") == 1 and word.replace(" ", "").isalpha()]
    for _ in range(count):
        a, b, c, d = (rng.choice(single if rng.random() < 0.6 else double) for _ in range(4))
        yield rng.choice(TOPICS).format(a=a, b=b, c=c, d=d)


def reasoning(rng: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        x, y, z = rng.randint(2, 90), rng.randint(2, 40), rng.randint(2, 12)
        yield rng.choice(REASONING).format(x=x, y=y, z=z, s=x + y * z)


def functions(rng: random.Random, count: int) -> Iterator[str]:
    """Tasks from the docstrings of the standard library and of installed packages."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(
        path for folder in folders for path in [*Path(folder).glob("*.py"), *Path(folder).glob("*/*.py")]
    ):
        try:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and len(node.args.args) < 5:
                text = (ast.get_docstring(node) or "").strip()
                if 40 < len(text) < 600:
                    names = ", ".join(arg.arg for arg in node.args.args if arg.arg != "self")
                    found.setdefault(node.name, (names, text))
    for name in rng.sample(sorted(found), min(count, len(found))):
        names, text = found[name]
        head = f'def {name}({names}):\n    """{text}"""\n'
        form, language = rng.choice(CODE), rng.choice(LANGUAGES)
        yield form.format(head=head, name=name, arguments=names, first=text.splitlines()[0], language=language)


def own_turns(target: str, count: int) -> Iterator[str]:
    """User turns that the target writes itself, from its system prompt alone."""
    llm = LLM(target, speculative={"method": "none"}, max_batch_size=48, max_seq_len=1024)
    params = [SamplingParams(temperature=1.0, max_tokens=160, seed=seed) for seed in range(count)]
    for made in llm.generate([OPENING] * count, params):
        if made.finish_reason == "stop" and 8 <= len(made.text.strip()) <= 2000:
            yield made.text.strip()


def held_out(data: Path) -> list[str]:
    """First turns of MT-bench, every sixth task of HumanEval, every sixtieth question of GSM8K's test set."""
    bench = data / "bench"
    tasks = rows(bench / "HumanEval.jsonl")[::6]
    return [
        *(row["turns"][0] for row in rows(bench / "mt_bench_question.jsonl")),
        *(f"Complete this Python function:\n```python\n{row['prompt']}```" for row in tasks),
        *(row["question"] for row in rows(bench / "gsm8k_test.jsonl")[::60]),
    ]


def benchmarks(data: Path) -> Iterator[str]:
    for name in ("mt_bench_question", "spec_bench_question"):
        for row in rows(data / "bench" / f"{name}.jsonl"):
            yield from row["turns"]
    yield from (row["prompt"] for row in rows(data / "bench" / "HumanEval.jsonl"))
    yield from (row["question"] for row in rows(data / "bench" / "gsm8k_test.jsonl"))


def prompts(data: Path, wordnet: Path, target: str, rng: random.Random) -> Iterator[str]:
    yield from topics(wordnet, rng, 3000)
    yield from reasoning(rng, 350)
    yield from functions(rng, 850)
    for name, (count, turn) in CHATS.items():
        talks = [row["messages"] for row in rows(data / "chat" / f"{name}.jsonl") if len(row["messages"]) > turn]
        yield from (talk[turn]["content"] for talk in rng.sample(talks, min(count, len(talks))))
    stories = [row["text"] for name in STORIES for row in rows(data / "text" / f"{name}.jsonl")]
    for story in rng.sample(stories, min(500, len(stories))):
        yield rng.choice(TEXTS).format(story[: rng.randint(400, 1300)].rpartition(".")[0] + ".")
    yield from own_turns(target, 3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rng, taken = random.Random(7), set().union(*map(grams, benchmarks(given.data)))
    kept = {text for text in prompts(given.data, given.wordnet, given.target, rng) if 3 < len(text) <= LONGEST}
    kept = {text for text in kept if not grams(text) & taken}
    shuffled = sorted(kept)
    rng.shuffle(shuffled)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": f"p{at}", "prompt": text}) + "\n" for at, text in enumerate(shuffled))
    with (given.out / "held.jsonl").open("w", encoding="utf-8") as file:
        turns = ([{"role": "user", "content": text}] for text in held_out(given.data))
        file.writelines(json.dumps({"id": f"h{at}", "messages": turn}) + "\n" for at, turn in enumerate(turns))


if __name__ == "__main__":
    main()
