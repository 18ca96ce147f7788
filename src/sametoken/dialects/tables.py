"""The tables of foreign keys as Markdown: `python -m sametoken.dialects.tables` prints what docs/server.md holds."""

from __future__ import annotations

from collections.abc import Iterator

from sametoken.dialects import trtllm, vllm
from sametoken.dialects.flags import FLAGS, spelled
from sametoken.dialects.rules import Group, NoEffect, Only, Rule, Sets, Table

TITLES: tuple[tuple[str, Table], ...] = (
    ("Options of `trtllm-serve` and `vllm serve` that are spelled otherwise here or not needed", {
        "`, `".join(map(spelled, (name, *flag.aliases))): flag.rule for name, flag in FLAGS.items()
    }),
    ("Keys of the YAML file", trtllm.TOP),
    ("`speculative_config` of the YAML file, any `decoding_type`", trtllm.COMMON),
    ("... and with `Eagle`, `Eagle3`", trtllm.EAGLE),
    ("... and with `NGram`", trtllm.NGRAM),
    ("... and with `SA`", trtllm.SUFFIX),
    ("... and with `Medusa`", trtllm.MEDUSA),
    ("Keys of `--speculative-config`", vllm.COMMON),
    ("... and with method `ngram`", vllm.NGRAM),
    ("... and with method `suffix`", vllm.SUFFIX),
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
            yield path + key, _fate(rule)


def _fate(rule: Rule) -> str:
    match rule:
        case Sets(setting, _, note):
            return f"sets `{spelled(setting)}`" + (f"; {note}" if note else "")
        case NoEffect(_, reason, _):
            return f"no effect: {reason}"
        case Only(values, reason):
            allowed = " or ".join(f"`{str(value).lower()}`" for value in values)
            return (f"only {allowed}: " if allowed else "refused: ") + reason
        case Group():
            raise TypeError(rule)


if __name__ == "__main__":
    print(markdown(), end="")
