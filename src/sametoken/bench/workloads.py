"""Workloads: prompts by category, built in, from files, or from a dataset of the Hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken.errors import ConfigError, HubError, RequestError, unknown_name
from sametoken.prompts.conversations import DataRow
from sametoken.prompts.files import PromptItem, parse_items, read_items
from sametoken.prompts.sources import CATEGORISED, Conversation, Source, as_turn, encode_prompt, nonempty_text

if TYPE_CHECKING:
    from sametoken.engine.llm import LLM

BUILTIN = "builtin"
HUB = "hf:"


class Workload(NamedTuple):
    """Named prompts.

    Attributes:
        name: name of the workload.
        format: recognised format of the entries.
        items: prompts.
    """

    name: str
    format: str
    items: tuple[PromptItem, ...]


def read_workload(name: str, limit: int | None = None, categories: Sequence[str] = (), turns: int = 1) -> Workload:
    """Read a workload.

    Args:
        name: "builtin", a file of JSON lines, or "hf:org/name[:split[:column]]".
        limit: greatest number of prompts, selected evenly from all categories.
        categories: selected categories; () for all.
        turns: greatest number of turns of a conversation.

    Raises:
        SametokenError: the workload cannot be read, its format is unknown, or it lacks a category.
    """
    if name == BUILTIN:
        read = Workload(name, BUILTIN, tuple(PromptItem(category, as_turn(text)) for category, text in CATEGORISED))
    elif name.startswith(HUB):
        read = _of_hub(name, limit)
    else:
        labels, items = read_items(name, "--workload")
        read = Workload(Path(name).stem, ", ".join(labels), tuple(items))
    known = list(dict.fromkeys(item.category for item in read.items))
    for category in categories:
        if category not in known:
            raise ConfigError(f"--category: {unknown_name(f'category of {name}', category, known)}")
    chosen = [item for item in read.items if not categories or item.category in categories]
    kept = [item._replace(later=item.later[: turns - 1]) for item in _spread(chosen, limit)]
    return read._replace(items=tuple(kept))


def _spread(items: Sequence[PromptItem], limit: int | None) -> list[PromptItem]:
    """First items of each category, at most `limit` in all, as evenly as possible, in their original order."""
    seen: dict[str, int] = {}
    ranks = []
    for place, item in enumerate(items):
        seen[item.category] = seen.get(item.category, 0) + 1
        ranks.append((seen[item.category], place))
    return [items[place] for place in sorted(place for _, place in sorted(ranks)[:limit])]


def _of_hub(name: str, limit: int | None) -> Workload:
    """Workload of a dataset of the Hub; a stated column has texts, otherwise the rows' format is recognised."""
    parts = name.removeprefix(HUB).split(":")
    if len(parts) > 3 or not all(parts):
        raise ConfigError(f"--workload {name}: expected hf:org/name, hf:org/name:split or hf:org/name:split:column")
    dataset, split = parts[0], parts[1] if len(parts) > 1 else "test"
    column = parts[2] if len(parts) > 2 else None
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError(f"datasets is not installed; --workload {name} needs it: pip install datasets") from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(dataset, split=split, streaming=True)
        # A dataset may be sorted by category; more rows than the limit are read to find several categories.
        taken = list(islice(rows, None if limit is None else 64 * limit))
    except Exception as error:
        # The library passes on all errors of its readers, its file system and its HTTP client.
        raise HubError(
            f"--workload {name}: {type(error).__name__}: {str(error)[:200]}; expected a dataset with the split "
            f"{split!r} that can be reached"
        ) from error
    if not taken:
        raise ConfigError(f"--workload {name} is empty; expected at least one row")
    found = [DataRow(f"{name}, row {number}", number, dict(row)) for number, row in enumerate(taken, 1)]
    if column is None:
        labels, items = parse_items(found)
        return Workload(name, ", ".join(labels), tuple(items))
    for row in found:
        if column not in row.entry:
            raise RequestError(f"{row.where}: {unknown_name('column', column, row.entry)}")
    texts = (nonempty_text(row.entry[column], row.where) for row in found)
    return Workload(name, f"column {column}", tuple(PromptItem("all", as_turn(text)) for text in texts))


def spell_turn(llm: LLM, source: Source) -> list[int]:
    """Token ids of a prompt; without a chat template, those of the text of a single turn."""
    if isinstance(source, Conversation) and len(source.messages) == 1 and not llm.tokenizer.has_chat_template:
        return encode_prompt(llm.tokenizer, str(source.messages[0].get("content", ""))).ids
    return encode_prompt(llm.tokenizer, source).ids


def fit(ids: Sequence[int], length: int | None) -> list[int]:
    """Prompt of exactly `length` tokens: its first ones, or the prompt repeated; unchanged for None."""
    if length is None:
        return list(ids)
    return list(islice((token for _ in range(-(-length // len(ids))) for token in ids), length))


FIT_RULE = "prompts are cut to their first tokens, or repeated from their beginning, until they have prompt_len tokens"
