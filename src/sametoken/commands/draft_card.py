"""Model card of a head that `sametoken draft` made, and the lines that the command ends with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from sametoken import __version__
from sametoken.checkpoint.paths import user_path
from sametoken.commands.draft_stages import DRAFT_LEN, FORMATS, TEMPERATURE, TRAINED, DraftJob, DraftState, written
from sametoken.files import replacing
from sametoken.train.budget import spell_time

CARD = "README.md"
DEFINITION = (
    "Acceptance length is the number of tokens for each forward of the target, over all prompts together: the bonus "
    f"token and the forward that reads the prompt count. Drafts are chains of {DRAFT_LEN}, never shortened. The share "
    "that is accepted at a place is of the drafts whose earlier guesses were all accepted. "
    "Other tools leave out the forward of the prompt, or average over prompts, and print other numbers."
)


def controller(run: dict[str, Any]) -> dict[str, Any]:
    """Variant of a measurement in which the controller chose the draft length."""
    found: dict[str, Any] = next(variant for variant in run["variants"] if variant["chosen"])
    return found


def mean_speed_up(run: dict[str, Any]) -> float:
    """Mean speed-up of a measurement over lengths of chains and the controller, which is less noisy than one."""
    return fmean(variant["speed_up"] for variant in run["variants"][1:])


def serve_line(job: DraftJob) -> str:
    """Command that serves the target with the head."""
    return shlex.join(["sametoken", "serve", job.model, "--draft", str(job.head)])


def summary(job: DraftJob, state: DraftState) -> Iterator[str]:
    """Yield the lines that the command ends with."""
    found, gain = state.results["evaluate 0"], controller(state.results[f"bench {state.content['chosen']}"])
    yield (
        f"{job.head}: acceptance length {found['acceptance_length']:.2f} on {found['prompts']} held-out prompts, "
        f"{gain['speed_up']:.2f} x plain at one stream; card: {job.head / CARD}"
    )
    if gain["speed_up"] < 1.05:
        yield "this head hardly pays on this machine: give more time, or data like those that you serve"
    if state.content["plan"]["hidden_states"]:
        yield f"only further training reads {job.out / 'prepared'}, which may be deleted"
    yield f"serve it: {serve_line(job)}"


def write_card(job: DraftJob, state: DraftState, lines: Sequence[str]) -> None:
    """Write the card into the head's directory.

    Args:
        lines: command lines of the stages.
    """
    with replacing(job.head / CARD) as file:
        file.write_text("\n".join(_card(job, state, lines)) + "\n", encoding="utf-8")


def _card(job: DraftJob, state: DraftState, lines: Sequence[str]) -> Iterator[str]:
    plan, settings, chosen = state.content["plan"], state.content["settings"], state.content["chosen"]
    place = user_path(job.model)
    name = place.stem if place.is_file() else place.name if place.is_dir() else job.model
    yield from ("---", f"base_model: {name}", "library_name: sametoken", "tags:", "- speculative-decoding", "- eagle3")
    yield from ("---", "", f"# EAGLE-3 head for {name}", "")
    form = "as trained" if chosen == TRAINED else chosen
    vocabulary = "all of its tokens" if job.vocabulary is None else f"{job.vocabulary} of its tokens"
    yield f"Made by `sametoken draft` {__version__}. The weights are {form}; the head proposes {vocabulary}."
    yield f"It changes no token that the target writes. Target: {name}, SHA-256 `{settings['model']}` (of its"
    yield "configuration and of samples of its weights). The license of the target applies to what is derived from it."
    yield from ("", "```sh", serve_line(job), "```", "", "## Figures", "")
    yield from _acceptance(state)
    yield from ("", DEFINITION, "")
    yield from _speed(job, state)
    yield from ("", "## Data and recipe", "")
    yield from _recipe(job, state, plan)
    yield from ("", "The commands, in turn:", "", "```sh", *lines, "```")


def _acceptance(state: DraftState) -> Iterator[str]:
    judged = {name: state.results[f"evaluate {name}"] for name in ("0", f"{TEMPERATURE:g}")}
    places = max(len(found["by_position"]) for found in judged.values())
    named = " | ".join(map(str, range(1, places + 1)))
    yield f"| temperature | prompts | acceptance length | accepted at place {named} |"
    yield "|" + " --- |" * (3 + places)
    for name, found in judged.items():
        shares = [f"{share:.2f}" for share in found["by_position"]]
        cells = [name, str(found["prompts"]), f"{found['acceptance_length']:.3f}", *shares]
        yield "| " + " | ".join(cells + [""] * (3 + places - len(cells))) + " |"
    categories = judged["0"]["by_category"]
    if categories:
        yield from ("", "| category, temperature 0 | acceptance length |", "| --- | --- |")
        yield from (f"| {name} | {length:.3f} |" for name, length in categories.items())


def _speed(job: DraftJob, state: DraftState) -> Iterator[str]:
    heads = {form: run for form in (TRAINED, *FORMATS) if (run := state.results.get(f"bench {form}")) is not None}
    first = next(iter(heads.values()))
    yield f"Speed at one stream, temperature 0, {first['prompts']} held-out prompts, on"
    yield f"{first['cpu']}, {first['threads']} threads (x plain decoding in the same run):"
    names = [_variant(each) for each in first["variants"]]
    yield from ("", f"| head | MB | {' | '.join(names)} |", "|" + " --- |" * (2 + len(names)))
    for form, run in heads.items():
        size = sum(each.stat().st_size for each in written(job, form).glob("*.safetensors")) / 1e6
        cells = [f"{each['tokens_per_second']:.1f} tokens/s ({each['speed_up']:.2f} x)"
                 for each in run["variants"]]  # fmt: skip
        yield f"| {form} | {size:.1f} | {' | '.join(cells)} |"


def _variant(found: dict[str, Any]) -> str:
    if found["chosen"]:
        return "chosen by the controller"
    return f"chains of {found['max_draft_len']}" if found["max_draft_len"] else "plain"


def _recipe(job: DraftJob, state: DraftState, plan: dict[str, Any]) -> Iterator[str]:
    prepared, trained = state.results["prepare"], state.results["train"]
    source = f"{len(job.data)} given files" if job.data else "the target itself, which wrote the users' turns too"
    yield f"- Prompts: {source}. Answers: the target's own, half at temperature 0, half at {TEMPERATURE:g}."
    yield (
        f"- Training data: {prepared['samples']} conversations, {prepared['tokens']} tokens. {prepared['excluded']} "
        "were left out, because a user's turn shares 13 successive tokens (without case and punctuation) with a "
        "held-out prompt."
    )
    judged = state.results["evaluate 0"]["prompts"]
    yield (
        f"- Held-out prompts: {judged}. Training kept the head that accepts most on them, of "
        f"{plan['evaluations']} evaluations."
    )
    yield (
        f"- Training: `sametoken train` with its defaults for EAGLE-3, {plan['epochs']:g} epochs, {trained['steps']} "
        f"steps. Everything took {spell_time(state.content['spent_s'])}."
    )
