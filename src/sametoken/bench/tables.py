"""Results of a run as tables of text, for the terminal and the HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sametoken.bench.record import Cell, Load, Mismatch, Run
from sametoken.bench.variant import Estimate, Spread, Variant


class Table(NamedTuple):
    """Table of text.

    Attributes:
        title: title.
        head: headings of the columns.
        rows: cells of each row, at most as many as `head`.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(run: Run) -> Iterator[Table]:
    """All tables of a run."""
    for cell in run.cells:
        yield from (_speeds(cell), _times(cell), _categories(cell), _positions(cell), _histogram(cell))
        if cell.chosen is not None and cell.chosen.choices:
            yield _choices(cell.chosen)
        if any(one.acceptance.reliability for one in cell.speculative):
            yield _reliability(cell)
    if run.loads:
        yield from (_loads(run.loads), _latencies_of(run.loads))


def _speeds(cell: Cell) -> Table:
    title = f"{cell.label}: {cell.requests} requests, prompts of {cell.mean_prompt_tokens:.0f} tokens on average"
    head = ("drafts", "speed-up", "tokens/s", "acceptance rate", "acceptance length", "forwards/token")
    rows = [
        (
            one.label,
            factor(one.speed_up) if one.max_draft_len else "",
            f"{one.tokens_per_second:.1f}",
            f"{one.acceptance.rate:.1%}" if one.acceptance.drafted else "",
            f"{one.acceptance.length:.2f}",
            f"{one.acceptance.forwards_per_token:.2f}",
        )
        for one in cell.variants
    ]
    return Table(title, head, rows)


def _times(cell: Cell) -> Table:
    head = ("drafts", "TTFT p50", "p95", "ITL p50", "p95", "p99", "draft", "verify", "host")
    rows = [
        (
            one.label,
            _ms(one.ttft_s.p50),
            _ms(one.ttft_s.p95),
            *_latencies(one.inter_token_s),
            *(f"{share:.0%}" for share in (one.time_share.draft, one.time_share.verify, one.time_share.host)),
        )
        for one in cell.variants
    ]
    return Table("milliseconds to the first token and between tokens, and where the time went", head, rows)


def _categories(cell: Cell) -> Table:
    rows = []
    for place, plain in enumerate(cell.plain.categories):
        found = [one.categories[place] for one in cell.speculative]
        figures = (f"{factor(c.speed_up)} at {c.acceptance.length:.2f}" for c in found)
        rows.append((plain.name, str(plain.requests), str(plain.tokens), *figures))
    head = ("category", "requests", "tokens", *(one.label for one in cell.speculative))
    return Table("speed-up and acceptance length by category", head, rows)


def _positions(cell: Cell) -> Table:
    longest = max(len(one.acceptance.positions) for one in cell.speculative)
    rows = []
    for one in cell.speculative:
        for words, rate in (("of all guesses", "unconditional"), ("of those reached", "conditional")):
            rates = (getattr(position, rate) for position in one.acceptance.positions)
            rows.append((f"{one.label}, {words}", *("" if share is None else f"{share:.1%}" for share in rates)))
    return Table("guesses accepted by position", ("drafts", *map(str, range(1, longest + 1))), rows)


def _histogram(cell: Cell) -> Table:
    counts = {one.label: one.acceptance for one in cell.speculative}
    most = max(len(found.accepted_lengths) for found in counts.values())
    rows = [
        (label, *(f"{n / max(found.forwards, 1):.1%}" for n in found.accepted_lengths))
        for label, found in counts.items()
    ]
    return Table("forwards by how many guesses they accepted", ("drafts", *map(str, range(most))), rows)


def _choices(chosen: Variant) -> Table:
    total = sum(choice.steps for choice in chosen.choices)
    rows = [
        (str(one.draft_len or "none"), f"{one.steps / total:.1%}", _ms(one.step_s), f"{one.tokens_per_row:.2f}")
        for one in chosen.choices
    ]
    head = ("longest draft allowed", "decoding steps", "milliseconds", "tokens per row")
    return Table(f"what the controller chose ({chosen.label})", head, rows)


def _reliability(cell: Cell) -> Table:
    rows = [
        (one.label, each.drafter, f"{each.low:.0%} to {each.high:.0%}", str(each.tried), f"{each.expected:.1%}",
         f"{each.accepted:.1%}")
        for one in cell.speculative for each in one.acceptance.reliability
    ]  # fmt: skip
    head = ("drafts", "drafter", "chance", "guesses", "expected", "accepted")
    return Table("expected against real acceptance, by the chance that was expected", head, rows)


def _loads(loads: Sequence[Load]) -> Table:
    head = ("load", "side", "speed-up", "tokens/s", "latency p50", "p95", "requests", "failed")
    rows = [
        (
            f"{load.workload}, temperature {load.temperature:g}, {load.label}",
            load.side,
            factor(load.speed_up) if load.speed_up else "",
            f"{load.tokens_per_second:.1f}",
            _ms(load.latency_s.p50),
            _ms(load.latency_s.p95),
            str(load.requests * len(load.round_s)),
            str(sum(load.failures.values())),
        )
        for load in loads
    ]
    return Table("servers under load: tokens and milliseconds per request", head, rows)


def _latencies_of(loads: Sequence[Load]) -> Table:
    head = ("load", "side", "TTFT p50", "p95", "p99", "per token", "ITL p50", "p95", "p99")
    rows = [
        (
            f"{load.workload}, temperature {load.temperature:g}, {load.label}",
            load.side,
            *_latencies(load.ttft_s),
            _ms(load.per_token_s.mean) if load.per_token_s else "",
            *_latencies(load.inter_token_s, "~" * (load.inter_token_basis == "estimated")),
        )
        for load in loads
    ]
    return Table("milliseconds to the first token and between tokens", head, rows)


def verdicts(run: Run) -> list[str]:
    """Lines on equal or different outputs, failed requests, and estimated values."""
    distinct = list(Counter(run.mismatches).items())
    texts = [f"different from plain decoding: {_mismatch(found)}, in {count} takes" for found, count in distinct[:5]]
    if run.mismatches:
        texts.append(f"{len(run.mismatches)} takes differ; `sametoken verify` shows the logits")
    elif run.cells:
        texts.append("token ids: equal to plain decoding in every take")
    for load in run.loads:
        if load.failures:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in load.failures.items())
            texts.append(f"{load.side}, {load.label}: failed requests: {reasons}")
        if load.equal_texts is not None and load.equal_texts < 1:
            texts.append(f"{load.label}: {load.equal_texts:.0%} of texts equal the baseline's")
    if any(load.inter_token_basis == "estimated" for load in run.loads):
        texts.append("~ estimated: tokens shared among chunks by characters; --continuous-usage may count them")
    return texts


def _mismatch(found: Mismatch) -> str:
    length = "chosen" if found.chosen else f"{found.max_draft_len}"
    branches = f", {found.tree_top_k} branches" if found.tree_top_k > 1 else ""
    return (
        f"{found.workload}, temperature {found.temperature:g}, batch {found.batch}, draft length {length}{branches}, "
        f"prompt {found.prompt}, position {found.position}: plain one by one {_token(found.plain)}, here "
        f"{_token(found.found)}"
    )


def _token(token: int | None) -> str:
    return "nothing (it ended)" if token is None else f"token {token}"


def _latencies(spread: Spread | None, mark: str = "") -> tuple[str, str, str]:
    if spread is None:
        return "", "", ""
    return mark + _ms(spread.p50), mark + _ms(spread.p95), mark + _ms(spread.p99)


def factor(interval: Estimate) -> str:
    """Text of a factor with its interval."""
    limits = "" if interval.low is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.value:.2f}x{limits}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
