"""Translation of grammars in GBNF, the notation of llama.cpp and of vLLM, to Lark's notation.

This module imports neither torch nor pydantic; see `grammar_trial`.
"""

from __future__ import annotations

import re

MOST_GBNF = 2**17  # characters
LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]*start\s*:(?!:=))")  # matches in every grammar in Lark's notation


def states_gbnf(text: str) -> bool:
    """True if a grammar is in GBNF."""
    return "::=" in text and LARK.search(text) is None


def lark_of_gbnf(text: str) -> str:
    """Translate a grammar in GBNF to Lark's notation.

    Raises:
        ValueError: the grammar is not valid, or too long.
    """
    from llguidance.gbnf_to_lark import RepetitionNode, gbnf_to_lark

    if len(text) > MOST_GBNF:
        raise ValueError(f"got {len(text)} characters, expected at most {MOST_GBNF}")
    # A repeat within a repeat keeps its parentheses; without this, ("a"{2}){3} becomes "a"{2}{3}.
    RepetitionNode.is_atomic = lambda _: False
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # the library raises plain exceptions
        raise ValueError(f"no grammar in GBNF: {str(error) or 'it is nested too deep'}") from error
    return lark
