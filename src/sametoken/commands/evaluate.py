"""`sametoken evaluate`: acceptance length of a head or a draft on given prompts, measured with the engine.

Exit code 1 means that the acceptance length is below the given bound.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sametoken import embedded
from sametoken.commands.models import use_threads
from sametoken.commands.options import THREADS, Argument, Chosen, Option, Values, settings_options
from sametoken.errors import ConfigError
from sametoken.options.declaration import Positive
from sametoken.options.engine import EngineConfig
from sametoken.prompts.suites import SUITES

if TYPE_CHECKING:
    from sametoken.prompts.suites import Suite
    from sametoken.train.evaluate import Evaluation

RUN = ("dtype", "device", "max_batch_size")
MOST = Annotated[int, Field(ge=1, le=1 << 20)]

NAME_WIDTH = 12  # characters of a category's name

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
        "suite", str, None,
        "a benchmark and its file, whose number of prompts, length of answers, chat form and categories hold: "
        f"{', '.join(SUITES)}. --num-samples takes a part of it, evenly from the categories.", "NAME FILE", words=True,
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
)  # fmt: skip
EXAMPLES = {
    "measure a head": "sametoken evaluate head --target MODEL --data held-out.jsonl",
    "measure it on a benchmark": "sametoken evaluate head --target MODEL --suite mt-bench question.jsonl",
    "let a script check it": "sametoken evaluate head --target MODEL --data held-out.jsonl --ar-lower-bound 2.5 --json",
}


def command(head: str, values: Chosen) -> int:
    """Measure the acceptance length of a head or draft: tokens per forward of the target, bonus included.

    The forward that reads the prompt counts. vLLM's value, 1 + accepted / drafts, is printed too.
    """
    suite, file = _check(values)
    bound = values["ar_lower_bound"]
    aside = sys.stderr if values["json"] else sys.stdout  # with --json, standard output has one JSON object alone
    engine = {name: values[name] for name in RUN}
    EngineConfig(**engine)
    use_threads(values["threads"])

    from sametoken.train.evaluate import Asked, definition, evaluate, open_llm, read_questions, read_suite

    tokens, count = values["max_tokens"], values["num_samples"]
    if suite is not None:
        tokens = tokens if "max_tokens" in values.given else suite.tokens
        count = min(count, suite.prompts) if "num_samples" in values.given else suite.prompts
    asked = Asked(values["max_draft_len"], tokens, values["temperature"], values["seed"], engine)
    llm = open_llm(values["target"], head, asked)
    words = definition(asked)
    if suite is None:
        questions = read_questions(file, llm, count, tokens)
    else:
        questions = read_suite(suite, file, llm, count, tokens)
        words = f"{_protocol(suite, count, tokens, len(questions))} {words}"
    if values["write_tree"] is not None:
        from sametoken.checkpoint.places import draft_directory
        from sametoken.train.static_tree import write_tree

        paths = write_tree(draft_directory(head), values["target"], llm, questions, values["write_tree"])
        print(f"{head}: a tree of {len(paths)} nodes, at most {max(map(len, paths))} deep", file=aside)
        llm = open_llm(values["target"], head, asked)
    found = evaluate(llm, questions, asked, progress=True)
    _print(found, words, values["json"])
    if bound is not None and found.acceptance_length < bound:
        print(f"acceptance length {found.acceptance_length:.3f} is below --ar-lower-bound {bound}", file=aside)
        return 1
    return 0


def _check(values: Values) -> tuple[Suite | None, str]:
    """Check all options that can be checked without a model; return the suite, if one is named, and the file."""
    if (bound := values["ar_lower_bound"]) is not None and not math.isfinite(bound):
        raise ConfigError(f"--ar-lower-bound {bound}: expected a finite number")
    name, _, file = (values["suite"] or "").partition(" ")
    if name and name not in SUITES:
        raise ConfigError(f"--suite {name!r}: expected one of {', '.join(SUITES)}")
    if file and values["data"] is not None:
        raise ConfigError(f"got the files {file} of --suite and {values['data']} of --data; leave one of them out")
    file = file or values["data"] or ""
    if not file and name:
        raise ConfigError(f"--suite {name} needs a file; expected --suite {name} FILE, the benchmark's own file")
    if not file:
        raise ConfigError("got no --data; expected --data FILE.jsonl with conversations that were not trained on")
    return SUITES.get(name), file


def _protocol(suite: Suite, count: int, tokens: int, fitting: int) -> str:
    """Protocol of a benchmark in words, with all deviations of this evaluation."""
    other = [f"only {count} prompts, evenly from the categories"] if count < suite.prompts else []
    other += [f"answers of at most {tokens} tokens"] if tokens != suite.tokens else []
    other += [f"{count - fitting} prompts left out, which do not fit into the context"] if fitting < count else []
    return suite.definition() + (f" (changed here: {'; '.join(other)})." if other else ".")


def _print(found: Evaluation, words: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.to_json() | {"definition": words}))
        return
    print(f"acceptance length {found.acceptance_length:.3f}: {found.tokens} tokens in {found.forwards} forwards")
    print(f"  1 + accepted / drafts {found.tokens_per_draft:.3f}, without the forwards that read the prompts")
    if found.left_out:
        print(f"  {found.left_out} later turns did not fit into the context and were left out")
    wide = max([NAME_WIDTH, *map(len, found.categories)])
    places = " ".join(f"{place:4}" for place in range(1, len(found.joint) + 1))
    print(f"  {'':{wide}}  turns  length  joint, by place" + " " * max(1, len(places) - 13) + "conditional")
    print(f"  {'':{wide}}                 {places}   {places}")
    for name, each in {**found.categories, "all": found}.items():
        joint, given = (" ".join(f"{share:4.2f}" for share in part) for part in (each.joint, each.by_position))
        print(
            f"  {name + ':':{wide}}  {each.prompts:5}  {each.acceptance_length:6.3f}  {joint:{len(places)}}   {given}"
        )
    print(words)
