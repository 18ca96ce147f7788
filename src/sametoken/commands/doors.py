"""Commands with the names of other servers, whose command lines and variables become words of `sametoken serve`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sametoken.dialects.llama_door import llama_server
from sametoken.dialects.peers import Passage, unread
from sametoken.dialects.vllm_door import vllm


class Passed(NamedTuple):
    """Translated command line of another server: the server's command, None for none, and its parts without effect."""

    program: str | None
    idle: list[str]


Door = Callable[[Sequence[str], Mapping[str, str]], Passage]
DOORS: Mapping[str, Door] = {"llama-server": llama_server, "vllm serve": vllm}
PREFIXES = {"LLAMA_ARG_": "llama-server", "VLLM_": "vllm serve"}  # prefixes of variables, with their server
PASSED: list[Passed] = []  # translated command line of this process, until its notes are logged
TABLES = {"llama-server": "llama_server", "vllm serve": "vllm"}


def through_door(program: str, arguments: Sequence[str]) -> list[str]:
    """Words of `sametoken` for a command line of another program; sets environment variables that options require.

    Raises:
        ConfigError: an option would change outputs or needs an unsupported feature, or its value is wrong.
    """
    if any(word in ("-h", "--usage") or word.startswith("--help") for word in arguments):
        return ["serve", "--help"]
    if "--version" in arguments:
        return ["--version"]
    passage = DOORS[program](arguments, os.environ)
    os.environ.update(passage.env)
    own = {prefix: TABLES[owner] for prefix, owner in PREFIXES.items() if owner == program}
    PASSED[:] = [Passed(program, [*passage.idle, *unread(os.environ, own)])]
    return ["serve", *passage.words]


def notes_of_start() -> list[str]:
    """Notes on options without effect in another program's command line, and on variables without effect.

    The notes on options are returned by the first call only.
    """
    program, idle = PASSED.pop() if PASSED else Passed(None, [])
    others = {prefix: "" for prefix, owner in PREFIXES.items() if owner != program}
    doors = " and ".join(f"`sametoken {owner}`" for owner in PREFIXES.values() if owner != program)
    notes = [f"no effect here: {', '.join(idle)}"] if idle else []
    if found := unread(os.environ, others):
        notes.append(f"no effect here: {', '.join(found)}; such variables are for {doors}")
    return notes
