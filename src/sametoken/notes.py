"""What docstrings say about names, in the `Attributes:` section of a class: for options, request fields, and pages."""

from __future__ import annotations

import inspect
import re


def purpose(owner: type) -> str:
    """What a class is, without its sections."""
    return " ".join(re.split(r"\n\n(?:Attributes|Raises|Args):", inspect.getdoc(owner) or "")[0].split())


def attribute_notes(owner: type) -> dict[str, str]:
    """What the `Attributes:` section of a class says about each name, one sentence or more.

    Several names before one colon share a note; lines indented deeper continue it.
    """
    text = inspect.getdoc(owner) or ""
    section = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    return {
        name: note
        for entry in re.split(r"\n(?=    \w)", section)
        for names, note in [_split_note(entry)]
        for name in names
    }


def _split_note(entry: str) -> tuple[list[str], str]:
    names, _, note = entry.strip().partition(":")
    return [name.strip() for name in names.split(",")], " ".join(note.split())
