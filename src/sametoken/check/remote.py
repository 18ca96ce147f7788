"""Speculation of a running server: figures from two scrapes of its metrics, a verdict, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sametoken.check.scrapes import Counters, Names, Scrape, counters

NEAR_ONE = 1.1  # tokens per forward below which drafts rarely gain time
RARE_FIRST = 0.3  # share of accepted first guesses below which the draft probably belongs to another target
RARE_LATER = 0.1  # share of drafts accepted up to a position, below which the position is not worth its row
FREE_ROWS = 64  # tokens of a forward up to which most machines are bound by memory bandwidth
MUCH_DRAFTING = 0.4  # share of the time spent on drafts that leads to advice
LONG_PROMPT, SHORT_LENGTH = 4096, 1.5  # tokens of a long prompt, and few tokens per forward after such a prompt


@dataclass(frozen=True)
class ServerFindings:
    """Findings about a server's speculation.

    Attributes:
        server: name and version of the server.
        model: name of the model.
        method: name of the drafter; "" if none is known.
        seconds: time between the two scrapes.
        recent: true for figures of the time between the scrapes, false for figures since the start of the server.
        running: mean number of running requests at the scrapes.
        waiting: mean number of waiting requests at the scrapes.
        tokens_per_second: generated tokens per second between the scrapes.
        prompt_tokens: mean tokens of a prompt; 0 if unknown.
        drafts: number of forwards of a sequence with a draft.
        draft_len: mean guesses of a draft.
        acceptance_length: tokens per forward with a draft, with the bonus token; 0 if unknown.
        acceptance_rate: accepted / guessed tokens.
        positions: share of drafts that were accepted up to each position.
        draft_share: share of the engine's time spent on drafts; None if the server does not report it.
        plain_share: share of forwards without a draft; None if the server does not report it.
        plain: share of forwards without a draft, by reason.
        verdict: "pays", "may pay", "does not pay", "off" or "unknown".
        reason: reason of the verdict.
        advice: recommended changes.
    """

    server: str
    model: str
    method: str
    seconds: float
    recent: bool
    running: float
    waiting: float
    tokens_per_second: float
    prompt_tokens: float
    drafts: float
    draft_len: float
    acceptance_length: float
    acceptance_rate: float
    positions: tuple[float, ...]
    draft_share: float | None
    plain_share: float | None
    plain: dict[str, float]
    verdict: str = "unknown"
    reason: str = ""
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON object of `sametoken doctor --url URL --json`."""
        return asdict(self)


def examine(first: Scrape, second: Scrape, seconds: float, about: Mapping[str, Any]) -> ServerFindings:
    """Findings from two scrapes.

    Args:
        first: earlier scrape.
        second: later scrape.
        seconds: time between them.
        about: description from other endpoints of the server: `model`, `version`, and if available `method`,
            `adaptive`, `acceptance_length` and `draft_len`.

    Raises:
        SametokenError: the server was restarted between the scrapes.
    """
    whole = counters(second)
    window = whole.since(counters(first))
    recent = window.generated > 0
    used = window if recent else whole
    length, rate = second.mean("spec_accept_length"), second.mean("spec_accept_rate")  # SGLang's last batch
    length = 1 + used.accepted / used.drafts if used.drafts else length or float(about.get("acceptance_length") or 0)
    draft_len = used.drafted / used.drafts if used.drafts and used.drafted else float(about.get("draft_len") or 0)
    plain = sum(used.plain.values())
    counts_plain = second.names.server == "sametoken"
    found = ServerFindings(
        server=f"{second.names.server} {about.get('version') or ''}".strip(),
        model=str(about.get("model", "")),
        method=str(about.get("method") or ("speculative decoding" if whole.drafts or length else "")),
        seconds=seconds,
        recent=recent,
        running=(first.total(first.names.running) + second.total(second.names.running)) / 2,
        waiting=(first.total(first.names.waiting) + second.total(second.names.waiting)) / 2,
        tokens_per_second=window.generated / seconds,
        prompt_tokens=used.prompt_tokens / used.prompts if used.prompts else 0.0,
        drafts=used.drafts,
        draft_len=draft_len,
        acceptance_length=length,
        acceptance_rate=used.accepted / used.drafted if used.drafted else rate,
        positions=_positions(used),
        draft_share=used.draft_s / used.engine_s if used.engine_s else None,
        plain_share=plain / (plain + used.drafts) if counts_plain and plain + used.drafts else None,
        plain={reason: count / (plain + used.drafts) for reason, count in used.plain.items() if count},
    )
    verdict, reason = _verdict(found, whole, bool(about.get("adaptive")))
    advice = tuple(_advice(found, second.names)) if verdict not in ("off", "unknown") else ()
    if verdict == "off":
        advice = (f"start the server with {second.names.turn_on}",)
    return ServerFindings(**{**vars(found), "verdict": verdict, "reason": reason, "advice": advice})


def _positions(used: Counters) -> tuple[float, ...]:
    """Shares of drafts accepted up to each position, among drafts of that length if the server counts these."""
    found = []
    for position in sorted(filter(str.isdecimal, used.positions), key=int):
        drafts = used.reached.get(position, used.drafts)
        if drafts:
            found.append(used.positions[position] / drafts)
    return tuple(found)


def _verdict(found: ServerFindings, whole: Counters, adaptive: bool) -> tuple[str, str]:
    """Verdict and its reason."""
    length, drafted = found.acceptance_length, found.drafts or found.acceptance_length
    if not found.method:
        return "off", "the server does not speculate: it has no draft"
    if not whole.generated and not length:
        return "unknown", "the server has generated nothing yet; run this again while it serves its usual requests"
    share = found.plain.get("gain", 0.0)
    if not drafted or share > 0.5:
        if share:
            return (
                "does not pay",
                f"{share:.0%} of forwards had no draft because drafting is not expected to gain time at this load",
            )
        return "does not pay", "no forward had a draft: requests chose another method, or nothing was found to guess"
    if length < NEAR_ONE:
        return "does not pay", f"a forward emits {length:.2f} tokens, and without drafts it emits 1"
    share = found.draft_share or 0.0
    limit = f"at most {length * (1 - share):.2f} times the speed of plain decoding"
    if length * (1 - share) < 1:
        return (
            "does not pay",
            f"a forward emits {length:.2f} tokens and drafting takes {share:.0%} of the time: {limit}",
        )
    if adaptive and found.plain_share is not None and found.plain_share < 0.5:
        return "pays", (
            f"the server measures what forwards and drafts cost, and chose to draft in {1 - found.plain_share:.0%} of "
            f"forwards; each of these emitted {length:.2f} tokens"
        )
    measure = "`sametoken bench --url URL --baseline-url PLAIN` measures it"
    if share:
        return "may pay", (
            f"a forward emits {length:.2f} tokens and drafting takes {share:.0%} of the time: {limit}, less what the "
            f"extra rows of a forward cost; {measure}"
        )
    return "may pay", (
        f"a forward emits {length:.2f} tokens, so drafting and the extra rows may together take up to "
        f"{length - 1:.0%} of a plain forward's time; {measure}"
    )


def _advice(found: ServerFindings, names: Names) -> Iterator[str]:
    """Recommended changes, the most likely cause first."""
    first, rows = (found.positions or (None,))[0], found.running * (1 + found.draft_len)
    if (first is not None and first < RARE_FIRST) or (found.positions == () and 0 < found.acceptance_length < NEAR_ONE):
        seen = (
            "hardly any guess comes true" if first is None else f"the first guess comes true in {first:.0%} of drafts"
        )
        yield (
            f"{seen}: the draft belongs to another target, chat template or kind of head, or its layer ids are read "
            "wrongly; `sametoken doctor HEAD --target MODEL` measures it"
        )
    elif found.prompt_tokens > LONG_PROMPT and found.acceptance_length < SHORT_LENGTH:
        yield (
            f"prompts have {found.prompt_tokens:,.0f} tokens on average, and heads that were trained on short texts "
            "guess worse behind them; `sametoken bench --prompt-len 512,8192` compares; train with longer texts"
        )
    if len(far := [at for at, share in enumerate(found.positions) if share < RARE_LATER]) and far[0] > 0:
        yield (
            f"guess {far[0] + 1} and later ones come true in fewer than {RARE_LATER:.0%} of drafts: set "
            f"{names.shorter} to {far[0]}"
        )
    if found.draft_share is not None and found.draft_share > MUCH_DRAFTING:
        yield (
            f"drafting takes {found.draft_share:.0%} of the time: take a smaller draft, --draft-quantization int8, or "
            f"a smaller {names.shorter}"
        )
    if rows > FREE_ROWS:
        yield (
            f"a forward computes about {rows:.0f} tokens ({found.running:.0f} sequences, {found.draft_len:.1f} guesses "
            f"each); where that is more than reading the weights hides, plain decoding is faster: {names.by_load} "
            "shortens drafts under load"
        )
    if names.server == "SGLang" and not found.tokens_per_second and not found.running:
        yield "this SGLang server reports no load; start it with --enable-metrics for current figures"
    if found.waiting >= 1:
        yield (f"{found.waiting:.0f} requests wait for a place: more places or servers help them more than drafts do")


def report(found: ServerFindings) -> str:
    """Printed findings, one fact per line."""
    when = (
        f"the last {found.seconds:g} s"
        if found.recent
        else f"the time since its start (nothing in {found.seconds:g} s)"
    )
    load = f"{found.running:.1f} running, {found.waiting:.1f} waiting, {found.tokens_per_second:.1f} tokens/s"
    rows = [
        ("server", found.server),
        ("model", found.model),
        ("method", found.method or "none"),
        ("figures of", when),
        ("load", load + (f", prompts of {found.prompt_tokens:,.0f} tokens" if found.prompt_tokens else "")),
    ]
    if found.acceptance_length:
        of = f", {found.acceptance_rate:.0%} of {found.draft_len:.1f} guesses" if found.draft_len else ""
        rows.append(("acceptance", f"{found.acceptance_length:.2f} tokens per forward with a draft{of}"))
    if found.positions:
        rows.append(("by position", ", ".join(f"{share:.0%}" for share in found.positions)))
    if found.draft_share is not None:
        rows.append(("drafting", f"{found.draft_share:.0%} of the engine's time"))
    if found.plain_share is not None:
        reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in found.plain.items())
        rows.append(("without a draft", f"{found.plain_share:.0%} of forwards" + (f": {reasons}" if reasons else "")))
    rows.append(("speculation", f"{found.verdict}: {found.reason}"))
    rows += [("advice", each) for each in found.advice]
    return "\n".join(f"{name:<16} {words}" for name, words in rows)
