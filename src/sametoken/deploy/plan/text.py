"""Text of a plan: YAML that people read, and commands with one option on a line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Readable(yaml.SafeDumper):  # type: ignore[misc]
    """Repeats what occurs twice, and writes several lines as a block."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def as_yaml(*documents: Mapping[str, Any]) -> str:
    """Documents in YAML, separated by `---`; keys keep their order."""
    text: str = yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, width=1000)
    return text


def here_documents(files: Mapping[str, str]) -> list[str]:
    """Shell commands that write files."""
    return [f"cat > {shlex.quote(name)} <<'END'\n{text}END" for name, text in files.items()]


def command(words: Iterable[str]) -> str:
    """A shell command with one option on a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines)
