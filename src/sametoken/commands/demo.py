"""`sametoken demo`: plain and speculative decoding side by side, with the same tokens, and the speed-up.

Each side is timed alone. A terminal replays both together at their measured speeds; other outputs get the texts one
after the other, without control codes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sametoken import embedded
from sametoken.commands.models import open_llm
from sametoken.commands.options import AS_JSON, Option, Values, engine_options, titled
from sametoken.commands.terminal import ACCEPTED, open_console
from sametoken.errors import ConfigError
from sametoken.options.declaration import Positive
from sametoken.options.sampling import SamplingParams
from sametoken.options.serving import CACHE
from sametoken.prompts.sources import encode_texts

if TYPE_CHECKING:
    from sametoken.check.race import Race, Score
    from sametoken.engine.llm import LLM

PROMPTS = (
    "What is a good way to learn to cook?",
    "Why is the sky blue? Explain it to a child.",
    "Write a short email that invites a friend to a picnic.",
    "List five things to pack for a hike, each with a reason.",
)
EMBEDDED_PROMPTS = (  # of the kind that the embedded target was trained on
    "Hi! A large latte with oat milk, please.",
    "Hello, I want to see a movie tonight. Can you get me two tickets?",
    "Hello! What do you like to do for fun?",
    "I just got a new dog!",
)
FRAMES_PER_SECOND = 30
REUSE = CACHE + "enable_block_reuse"

OPTIONS = (
    *titled(
        "What is shown",
        Option("max_tokens", int, 128, "number of tokens to generate per prompt, at most."),
        Option(
            "ignore_eos",
            bool,
            False,
            "go on after the end of the answer, so that the model writes the other speaker's turns too.",
        ),
        Option("temperature", float, 0.0, "randomness of the draw; 0 is greedy."),
        Option("seed", int, 0, "seed of the draw at temperatures above 0."),
        Option("repeat", Positive, 3, "number of runs per prompt and side; the median counts."),
        Option("color", bool, True, "show colours in a terminal."),
        AS_JSON,
    ),
    *(option for option in engine_options() if option.name != REUSE),
)
EXAMPLES = {
    "with the pair of models that comes with the package": "sametoken demo",
    "with a published model, which is downloaded once, and looked-up drafts": "sametoken demo smollm2",
    "with a model and its draft": "sametoken demo MODEL --draft DRAFT",
}


def command(model: str | None, values: Values) -> int:
    """Show plain and speculative decoding side by side: the same tokens, sooner."""
    wanted = ("max_tokens", "ignore_eos", "temperature", "seed")
    params = SamplingParams(**{name: values[name] for name in wanted})
    model = model or embedded.NAME
    prompts = EMBEDDED_PROMPTS if model == embedded.NAME else PROMPTS
    llms = [open_llm(model, {**values, "draft": draft, REUSE: False}) for draft in _drafts(model, values)]
    if llms[0].method == "none":
        raise ConfigError("the demo compares with speculative decoding; give --draft PATH, or --method ngram or suffix")
    if values["json"]:
        print(json.dumps(_record(llms, prompts, params, values["repeat"])))
    else:
        show(llms, prompts, params, values["repeat"], open_console(100, values["color"]))
    return 0


def _drafts(model: str, values: Values) -> list[str | None]:
    """Names of the drafts to run: the given one, or all of a named model."""
    known = embedded.named(model)
    asked = values["draft"] is not None or values["method"] is not None
    return [values["draft"]] if asked or known is None or not known.drafts else [*known.drafts]


def show(llms: Sequence[LLM], prompts: Sequence[str], params: SamplingParams, repeat: int, console: Console) -> None:
    """Run the races of all prompts and show them.

    Args:
        llms: engines of one target with different drafts, without reuse of prompts: a cached prompt would make every
            run after the first look faster.

    Raises:
        LosslessnessError: plain and speculative tokens differ.
    """
    from sametoken.check.race import score

    races = []
    for text, race in _races(llms, prompts, params, repeat):
        races.append(race)
        console.print(f"\n> {text}", markup=False, style="bold")
        replay = _replay if console.is_terminal else _print_all
        replay(console, llms[0], race, params)
    console.print(_table([*zip(prompts, (score([one]) for one in races), strict=True), ("all", score(races))]))
    for total in score(races):
        console.print(
            f"{total.method}: {total.tokens} tokens, identical to plain decoding's; runs of each: {repeat}. "
            f"Speed-up {total.speed_up:.2f}x, acceptance length {total.acceptance_length:.2f}.",
            soft_wrap=True,
        )


def _races(
    llms: Sequence[LLM], prompts: Sequence[str], params: SamplingParams, repeat: int
) -> Iterator[tuple[str, Race]]:
    """Prompts, each with the race of plain and speculative decoding."""
    from sametoken.check.race import race, record

    encoded = [prompt.ids for prompt in encode_texts(llms[0].tokenizer, prompts)]
    for each in llms:
        record(each, encoded[0], params)  # the first run allocates and compiles
    for text, prompt in zip(prompts, encoded, strict=True):
        with Console(stderr=True).status("timing plain and speculative decoding, each alone ..."):
            found = race(llms, prompt, params, repeat)
        yield text, found


def _record(llms: Sequence[LLM], prompts: Sequence[str], params: SamplingParams, repeat: int) -> dict[str, Any]:
    """Final figures of `show`, for --json: speeds in tokens per second, of each prompt and of all."""
    from sametoken.check.race import score

    races = list(_races(llms, prompts, params, repeat))
    each = [{"prompt": text, "drafts": [one._asdict() for one in score([race])]} for text, race in races]
    return {"runs": repeat, "prompts": each, "all": [one._asdict() for one in score([race for _, race in races])]}


def _replay(console: Console, llm: LLM, race: Race, params: SamplingParams) -> None:
    """Replay all sides together, each at the speed that was measured alone."""
    from sametoken.check.race import pieces

    texts = [pieces(llm, take.completion, params) for take in race.takes]

    def picture(seconds: float) -> RenderableType:
        panels = []
        for take, parts in zip(race.takes, texts, strict=True):
            count = take.tokens_at(seconds)
            spent = min(seconds, take.frames[-1][0])
            panels.append(
                Panel(
                    _coloured(parts[:count], take.completion.origins),
                    title=_title(take.completion.speculation.method),
                    subtitle=f"{count} tokens, {spent:.2f} s",
                    width=console.width // len(race.takes),
                )
            )
        return Columns(panels, padding=0)

    with Live(picture(0.0), console=console, auto_refresh=False) as live:
        begin = time.perf_counter()
        while (seconds := time.perf_counter() - begin) < race.seconds:
            live.update(picture(seconds), refresh=True)
            time.sleep(1 / FRAMES_PER_SECOND)
        live.update(picture(race.seconds), refresh=True)


def _title(method: str) -> str:
    return "plain" if method == "none" else f"{method}: green was guessed"


def _print_all(console: Console, llm: LLM, race: Race, params: SamplingParams) -> None:
    from sametoken.check.race import pieces

    texts = {"plain": "".join(pieces(llm, race.plain.completion, params))}
    for take in race.drafted:
        title = f"{take.completion.speculation.method}, ⟦drafted and accepted⟧"
        texts[title] = _bracketed(pieces(llm, take.completion, params), take.completion.origins)
    for title, text in texts.items():
        console.print(f"{title}:\n{text}", markup=False, soft_wrap=True)


def _coloured(parts: Sequence[str], origins: Sequence[bool]) -> Text:
    text = Text()
    for part, drafted in zip(parts, origins, strict=False):
        text.append(part, ACCEPTED if drafted else "")
    return text


def _bracketed(parts: Sequence[str], origins: Sequence[bool]) -> str:
    """Text with runs of drafted tokens in rare brackets, ⟦ and ⟧."""
    text, inside = "", False
    for part, drafted in zip(parts, origins, strict=True):
        if part and drafted != inside:
            text += "⟦" if drafted else "⟧"
            inside = drafted
        text += part
    said = text.rstrip("\n")  # the end of the turn is a new line, which follows the closing bracket
    return said + "⟧" * inside + text[len(said) :]


def _table(scores: Sequence[tuple[str, Sequence[Score]]]) -> Table:
    table = Table(title="median of tokens/s")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=28)
    table.add_column("draft", no_wrap=True)
    for name in ("tokens", "plain", "drafted", "speed-up", "acceptance length"):
        table.add_column(name, justify="right", min_width=6)
    for name, found in scores:
        for i, score in enumerate(found):
            table.add_row(
                Text(name if i == 0 else ""),
                score.method,
                str(score.tokens),
                f"{score.plain_speed:.1f}",
                f"{score.speed:.1f}",
                f"{score.speed_up:.2f}x",
                f"{score.acceptance_length:.2f}",
            )
    return table
