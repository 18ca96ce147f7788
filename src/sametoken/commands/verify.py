"""`sametoken verify`: runs the proof of losslessness on a model and shows it as a table; exit code 1 if it fails."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sametoken.commands.models import open_llm
from sametoken.commands.options import Option, Values, engine_options
from sametoken.commands.prompts import first_turns
from sametoken.config import METHODS, MODEL_METHODS
from sametoken.data.prompts import BUILT_IN, Source, Spelled, as_turn, spell
from sametoken.errors import ConfigError, unknown_name
from sametoken.interrupt import stop_at_signals
from sametoken.speculation.params import SamplingParams

if TYPE_CHECKING:
    from sametoken.commands.proof import Result
    from sametoken.engine.llm import LLM

INTERRUPTED = 130  # exit code

OPTIONS = (
    Option("method", list[str], None, "drafter to prove, repeatable; None is all that the models allow.", "METHOD"),
    Option("prompts", str, None, "JSON lines, each with prompt or messages; None is the built-in prompts.", "FILE"),
    Option("num_prompts", int, None, "use only the first prompts; None is all."),
    Option("max_tokens", int, 64, "tokens to compare at most per prompt."),
    Option("temperatures", str, "0,0.7,1.0", "temperatures, separated by commas.", "LIST"),
    Option("seed", int, 0, "seed of the first prompt; each further prompt has the next."),
    *(option for option in engine_options() if option.name != "method"),
)


def command(model: str | None, values: Values) -> int:
    """Prove that drafts change no token: plain against speculative decoding, one by one and batched."""
    temperatures = _temperatures(values["temperatures"])
    for method in values["method"] or ():
        if method not in METHODS:
            raise ConfigError(unknown_name("method", method, METHODS))
    if values["num_prompts"] is not None and values["num_prompts"] < 1:
        raise ConfigError(f"--num-prompts {values['num_prompts']}: expected at least 1")
    sources = first_turns(values["prompts"]) if values["prompts"] else None
    params = SamplingParams(max_tokens=values["max_tokens"], seed=values["seed"])
    chosen = {key: value for key, value in values.items() if key != "method"}
    llm = open_llm(model, chosen)
    prompts = _spelled(llm, sources)[: values["num_prompts"]]
    return verify(llm, prompts, params, temperatures, values["method"])


def verify(
    llm: LLM,
    prompts: Sequence[Spelled],
    params: SamplingParams,
    temperatures: Sequence[float],
    methods: Sequence[str] | None = None,
) -> int:
    """Runs the proof and prints it.

    Args:
        params: as for `Proof`.
        methods: drafters to prove; None is plain batches and every drafter of the engine.

    Returns:
        0 if all token ids are equal, 1 if one differs, 130 if a signal ended the comparison before that was known.
    """
    from rich.console import Console

    from sametoken.commands.proof import PLAIN, Proof

    known = ", ".join(llm.methods)
    if missing := [m for m in methods or () if m not in (PLAIN, *llm.methods)]:
        kind = MODEL_METHODS.get(missing[0], "a draft")
        raise ConfigError(f"--method {missing[0]} needs {kind}; give --draft PATH (this engine has {known})")
    proof = Proof(llm, [prompt.ids for prompt in prompts], params)
    results: list[Result] = []
    interrupted = False
    with _without_advice(), Console(stderr=True).status("comparing with plain decoding ...") as status:
        try:
            with stop_at_signals() as stop, stop.at_once():
                for result in proof.run(methods or (PLAIN, *llm.methods), temperatures):
                    results.append(result)
                    last = f"{result.case.method} at {result.case.temperature}"
                    status.update(f"{len(results)} cases compared, the last {last}")
        except KeyboardInterrupt:
            interrupted = True
    if not results:
        print("stopped before a case was compared", file=sys.stderr)
        return INTERRUPTED
    _print_table(results, len(prompts))
    different = [result for result in results if result.difference is not None]
    compared = sum(result.tokens for result in results)
    if different:
        print(_describe(llm, different[0], prompts))
        return 1
    found = f"{compared} tokens in {len(results)} cases of {len(prompts)} prompts"
    if interrupted:
        print(f"stopped, equal so far: {found}; run the same command for all cases")
        return INTERRUPTED
    print(f"all equal: {found}")
    return 0


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keeps back what the engine says of drafts that do not pay: here every method has its turn, none included."""
    log = logging.getLogger("sametoken")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= value < math.inf for value in found):
        raise ConfigError(f"--temperatures {text!r}: expected numbers >= 0 separated by commas, for example 0,0.7,1.0")
    return found


def _spelled(llm: LLM, sources: Sequence[Source] | None) -> list[Spelled]:
    """The prompts as ids; built-in ones are the user's turn where the model has a chat template."""
    if sources is None:
        sources = [as_turn(text) if llm.tokenizer.has_chat_template else text for text in BUILT_IN]
    return [spell(llm, source) for source in sources]


def _print_table(results: Sequence[Result], prompts: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "temperature", "batch", "tokens compared", "acceptance length", "token ids")
    for case, tokens, acceptance, difference in results:
        batch = f"{prompts} together" if case.batched else "one by one"
        verdict = "equal" if difference is None else "[bold red]different"
        table.add_row(case.method, f"{case.temperature:g}", batch, str(tokens), f"{acceptance:.2f}", verdict)
    # Rich cuts columns to 80 characters where it finds no terminal.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100).print(table)


def _describe(llm: LLM, result: Result, prompts: Sequence[Spelled]) -> str:
    """The first difference in words."""
    assert result.difference is not None
    index, position, plain, other, margin = result.difference
    case, batch = result.case, "batched" if result.case.batched else "one by one"
    gap = "past the end of the plain output" if margin is None else f"logit margin there {margin:.6g}"
    return (
        f"first difference: method {case.method}, temperature {case.temperature:g}, {batch}, prompt {index} "
        f"{prompts[index].text!r}, position {position}: plain {_token(llm, plain)}, "
        f"speculative {_token(llm, other)}; {gap}"
    )


def _token(llm: LLM, token: int | None) -> str:
    return "nothing (it ended)" if token is None else f"{token} {llm.tokenizer.token_text(token)!r}"
