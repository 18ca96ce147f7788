"""`sametoken evaluate`: acceptance length of a head or a draft on given prompts, measured with the engine.

Exit code 1 means that the acceptance length is below the given bound.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sametoken import embedded
from sametoken.commands.models import use_threads
from sametoken.commands.options import THREADS, Argument, Option, Values, settings_options
from sametoken.errors import ConfigError
from sametoken.options.declaration import Positive
from sametoken.options.engine import EngineConfig

if TYPE_CHECKING:
    from sametoken.train.evaluate import Evaluation

RUN = ("dtype", "device", "max_batch_size")
MOST = Annotated[int, Field(ge=1, le=1 << 20)]

ARGUMENT = Argument(str, "the head or draft model: directory, training run or Hub id, or 'embedded'.", "HEAD")
OPTIONS = (
    Option("target", str, embedded.NAME, "the model that it drafts for: directory or Hub id, or 'embedded'.", "MODEL"),
    Option(
        "data",
        str,
        None,
        "file of conversations, or MT-Bench's or Spec-Bench's own file, whose prompts are answered.",
        "FILE",
    ),
    Option(
        "max_draft_len",
        Annotated[int, Field(ge=1, le=128)],
        5,
        "number of tokens of a draft; every draft has so many.",
        None,
        ("--steps",),
    ),
    Option("max_tokens", MOST, 64, "number of tokens of each answer at most."),
    Option("num_samples", MOST, 80, "number of conversations: the first of the file that fit."),
    Option("temperature", float, 0.0, "randomness of the draw; 0 is greedy."),
    Option("seed", int, 0, "seed of the draw, where it is not greedy."),
    Option("ar_lower_bound", float, None, "exit with code 1 if the acceptance length is below this."),
    Option(
        "write_tree",
        Positive,
        None,
        "for Medusa: measure which tokens the head proposes, and write a static tree of so many nodes into HEAD.",
    ),
    Option("json", bool, False, "print one JSON object instead of lines."),
    *(option for option in settings_options(EngineConfig) if option.name in RUN),
    THREADS,
)
EXAMPLES = {
    "measure a head": "sametoken evaluate head --target MODEL --data held-out.jsonl",
    "let a script check it": "sametoken evaluate head --target MODEL --data held-out.jsonl --ar-lower-bound 2.5 --json",
}


def command(head: str, values: Values) -> int:
    """Measure the acceptance length of a head or draft: tokens per forward of the target, bonus included.

    The forward that reads the prompt counts. vLLM's value, 1 + accepted / drafts, is printed too.
    """
    _check(values)
    bound = values["ar_lower_bound"]
    aside = sys.stderr if values["json"] else sys.stdout  # with --json, standard output has one JSON object alone
    engine = {name: values[name] for name in RUN}
    EngineConfig(**engine)
    use_threads(values["threads"])

    from sametoken.train.evaluate import Asked, evaluate, open_llm, read_questions

    asked = Asked(values["max_draft_len"], values["max_tokens"], values["temperature"], values["seed"], engine)
    llm = open_llm(values["target"], head, asked)
    questions = read_questions(values["data"], llm, values["num_samples"], asked.tokens)
    if values["write_tree"] is not None:
        from sametoken.checkpoint.places import draft_directory
        from sametoken.train.static_tree import write_tree

        paths = write_tree(draft_directory(head), values["target"], llm, questions, values["write_tree"])
        print(f"{head}: a tree of {len(paths)} nodes, at most {max(map(len, paths))} deep", file=aside)
        llm = open_llm(values["target"], head, asked)
    found = evaluate(llm, questions, asked, progress=True)
    _print(found, values["json"])
    if bound is not None and found.acceptance_length < bound:
        print(f"acceptance length {found.acceptance_length:.3f} is below --ar-lower-bound {bound}", file=aside)
        return 1
    return 0


def _check(values: Values) -> None:
    """Check all options that can be checked without a model."""
    if values["data"] is None:
        raise ConfigError("got no --data; expected --data FILE.jsonl with conversations that were not trained on")
    if (bound := values["ar_lower_bound"]) is not None and not math.isfinite(bound):
        raise ConfigError(f"--ar-lower-bound {bound}: expected a finite number")


def _print(found: Evaluation, as_json: bool) -> None:
    if as_json:
        values = {"acceptance_length": found.acceptance_length, "tokens_per_draft": found.tokens_per_draft}
        print(json.dumps(values | asdict(found)))
        return
    print(f"acceptance length {found.acceptance_length:.3f}: {found.tokens} tokens in {found.forwards} forwards")
    print(f"  1 + accepted / drafts {found.tokens_per_draft:.3f}, without the forwards that read the prompts")
    print("  accepted by position: " + "  ".join(f"{share:.2f}" for share in found.by_position))
    if found.left_out:
        print(f"  {found.left_out} later turns did not fit into the context and were left out")
    for name, length in found.by_category.items():
        print(f"  {name}: {length:.3f}")
