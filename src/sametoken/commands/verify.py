"""`sametoken verify`: the proof of `check.proof` on a model, printed as a table; exit code 1 if it fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sametoken import kinds
from sametoken.commands.given import first_turns
from sametoken.commands.models import open_llm
from sametoken.commands.options import AS_JSON, Option, Values, engine_options, numbers, several, titled
from sametoken.commands.terminal import open_console
from sametoken.errors import ConfigError, unknown_name
from sametoken.interrupt import INTERRUPTED, stop_at_signals
from sametoken.options.declaration import Positive
from sametoken.options.sampling import SamplingParams
from sametoken.options.speculation import METHODS
from sametoken.prompts.sources import EncodedPrompt, encode_prompt, encode_texts

if TYPE_CHECKING:
    from sametoken.check.proof import Comparison
    from sametoken.engine.llm import LLM

HEATS = several(SamplingParams, "temperature")
TEMPERATURES = Option("temperatures", HEATS, "0,0.7,1.0", "temperatures, separated by commas.", "LIST")
OPTIONS = (
    *titled(
        "What is compared",
        Option(
            "method",
            list[str],
            None,
            "drafter to prove; may be given several times; without it: all that the models allow.",
            "METHOD",
        ),
        Option(
            "data",
            str,
            None,
            "file of JSON lines, each with `prompt` or `messages`; without it: the built-in prompts.",
            "FILE",
        ),
        Option("num_prompts", Positive, None, "number of prompts to use, from the first; without it: all."),
        Option("max_tokens", int, 64, "number of tokens to compare per prompt, at most."),
        TEMPERATURES,
        Option("seed", int, 0, "seed of the first prompt; each further prompt has the next."),
        AS_JSON,
    ),
    *(option for option in engine_options() if option.name != "method"),
)
EXAMPLES = {
    "prove it for the pair of models that comes with the package": "sametoken verify",
    "prove it for a model and its draft": "sametoken verify MODEL --draft DRAFT",
    "prove it for your own prompts": "sametoken verify MODEL --draft DRAFT --data prompts.jsonl --num-prompts 20",
}


def command(model: str | None, values: Values) -> int:
    """Prove that drafts change no token: plain against speculative decoding, one by one and batched."""
    for method in values["method"] or ():
        if method not in METHODS:
            raise ConfigError(unknown_name("method", method, METHODS))
    sources = first_turns(values["data"]) if values["data"] else None
    params = SamplingParams(max_tokens=values["max_tokens"], seed=values["seed"])
    inside = next(filter(kinds.inside, values["method"] or ()), None)  # part of the engine only if it is named
    chosen = {key: value for key, value in values.items() if key != "method"} | ({"method": inside} if inside else {})
    llm = open_llm(model, chosen)
    tokenizer = llm.tokenizer
    given = None if sources is None else [encode_prompt(tokenizer, source) for source in sources]
    prompts = (given or encode_texts(tokenizer))[: values["num_prompts"]]
    temperatures = numbers(TEMPERATURES, values["temperatures"])
    return print_proof(llm, prompts, params, temperatures, values["method"], as_json=values["json"])


def print_proof(
    llm: LLM,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    temperatures: Sequence[float],
    methods: Sequence[str] | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Run the proof (arguments as for `prove`) and print it.

    Returns:
        0 if all token ids are equal, 1 if one differs, 130 if a signal ended the comparison before that was known.
    """
    from rich.console import Console

    from sametoken.check.proof import in_words, prove, without_advice

    cases = prove(llm, prompts, params, temperatures, methods)
    found: list[Comparison] = []
    interrupted = False
    with without_advice(), Console(stderr=True).status("comparing with plain decoding ...") as status:
        try:
            with stop_at_signals() as stop, stop.at_once():
                for comparison in cases:
                    found.append(comparison)
                    last = f"{comparison.case.method} at {comparison.case.temperature}"
                    status.update(f"{len(found)} cases compared, the last {last}")
        except KeyboardInterrupt:
            interrupted = True
    if not found:
        print("stopped before a case was compared", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        return _print_json(llm, found, prompts, interrupted)
    _print_table(found, len(prompts))
    if different := [comparison for comparison in found if comparison.difference is not None]:
        print(in_words(llm, different[0], prompts))
        return 1
    compared = (
        f"{sum(comparison.tokens for comparison in found)} tokens in {len(found)} cases of {len(prompts)} prompts"
    )
    if interrupted:
        print(f"stopped, equal so far: {compared}; run the same command for all cases")
        return INTERRUPTED
    print(f"all equal: {compared}")
    return 0


def _print_json(llm: LLM, found: Sequence[Comparison], prompts: Sequence[EncodedPrompt], interrupted: bool) -> int:
    from sametoken.check.proof import in_words

    different = next((each for each in found if each.difference is not None), None)
    cases = [
        {
            **each.case._asdict(),
            "tokens": each.tokens,
            "acceptance_length": each.acceptance_length,
            "equal": each.difference is None,
        }
        for each in found
    ]
    difference = None if different is None else in_words(llm, different, prompts)
    record = {"equal": different is None, "stopped": interrupted, "prompts": len(prompts), "cases": cases}
    print(json.dumps({**record, "difference": difference}))
    return 1 if different is not None else INTERRUPTED * interrupted


def _print_table(found: Sequence[Comparison], prompts: int) -> None:
    from rich.table import Table

    table = Table("method", "temperature", "batch", "tokens compared", "acceptance length", "token ids")
    for case, tokens, acceptance, difference in found:
        batch = f"{prompts} together" if case.batched else "one by one"
        verdict = "equal" if difference is None else "[bold red]different"
        table.add_row(case.method, f"{case.temperature:g}", batch, str(tokens), f"{acceptance:.2f}", verdict)
    open_console(100).print(table)
