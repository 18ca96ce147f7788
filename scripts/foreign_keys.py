"""The keys of other servers as Markdown tables, a part of docs/server.md that `reference` writes."""

from __future__ import annotations

from collections.abc import Iterator

from sametoken.dialects import trtllm, vllm
from sametoken.dialects.flags import FLAGS
from sametoken.dialects.rules import Group, Table, described, spelled

TITLES: tuple[tuple[str, Table], ...] = (
    ("Options of `trtllm-serve`, `vllm serve` and `llama-server` that are spelled otherwise here or not needed", {
        "`, `".join(map(spelled, (name, *flag.aliases))): flag.rule for name, flag in FLAGS.items()
    }),
    ("Keys of the YAML file", trtllm.TOP),
    ("`speculative_config` of the YAML file, any `decoding_type`", trtllm.COMMON),
    ("... and with `Eagle`, `Eagle3`", trtllm.OWN["Eagle"]),
    ("... and with `NGram`", trtllm.OWN["NGram"]),
    ("... and with `SA`", trtllm.OWN["SA"]),
    ("... and with `Medusa`", trtllm.OWN["Medusa"]),
    ("Keys of `--speculative-config`", vllm.COMMON),
    ("... and with method `ngram`", vllm.OF_METHODS["ngram"]),
    ("... and with method `suffix`", vllm.OF_METHODS["suffix"]),
)  # fmt: skip


def markdown() -> str:
    """All tables; keys of one fate share a row."""
    return "\n".join(line for title, table in TITLES for line in _table(title, table)).rstrip() + "\n"


def _table(title: str, table: Table) -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for key, fate in _fates(table):
        rows.setdefault(fate, []).append(f"`{key}`")
    yield from (f"**{title}**", "", "| key | here |", "|---|---|")
    yield from (f"| {', '.join(keys)} | {fate} |" for fate, keys in rows.items())
    yield ""


def _fates(table: Table, path: str = "") -> Iterator[tuple[str, str]]:
    for key, rule in table.items():
        if isinstance(rule, Group):
            if rule.absent is not None:
                yield f"{path}{key}: null", f"sets `{spelled(rule.absent[0])}` to {str(rule.absent[1]).lower()}"
            yield from _fates(rule.keys, f"{path}{key}.")
        else:
            yield path + key, described(rule, "`")
