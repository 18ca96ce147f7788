"""Types of values in llama-server's bodies: prompts, biases, seeds, and grammars in GBNF."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from sametoken.engine.gbnf import lark_of_gbnf
from sametoken.errors import RequestError
from sametoken.server.text_request import Pieces

RANDOM_SEEDS = (-1, 2**32 - 1)  # values with which llama-server chooses a seed
TEXT, MEDIA = "prompt_string", "multimodal_data"
MOST_PROMPTS = 1024


def lark_of(gbnf: str) -> str:
    """Convert a grammar from llama.cpp's notation, GBNF, to Lark's.

    Raises:
        RequestError: the text is not a grammar in GBNF, or too long.
    """
    try:
        return lark_of_gbnf(gbnf)
    except ValueError as error:
        raise RequestError(str(error), field="grammar", advice="correct it") from error


def one_prompt(given: object) -> object:
    """Prompt of one of llama-server's forms, as text or as `Pieces` of texts and token ids."""
    if isinstance(given, dict):
        if given.get(MEDIA):
            raise ValueError("expected no multimodal_data: this model reads text only")
        given = given.get(TEXT)
    if isinstance(given, str):
        return given
    pieces = isinstance(given, list) and given and all(type(each) in (str, int) for each in given)
    if not pieces or any(isinstance(each, int) and each < 0 for each in given):  # type: ignore[attr-defined]
        raise ValueError(f"expected text, token ids, or a list of both, or an object with {TEXT}")
    return Pieces(tuple(given))  # type: ignore[arg-type]


def _llama_prompts(given: object) -> object:
    """List of prompts, from one prompt or several.

    A list is several prompts if one of its members is a list or an object, or if all are texts.
    """
    if not isinstance(given, list):
        return [one_prompt(given)]
    if not 0 < len(given) <= MOST_PROMPTS and not all(isinstance(each, int) for each in given):
        raise ValueError(f"expected 1 to {MOST_PROMPTS} prompts")
    several = any(isinstance(each, list | dict) for each in given) or all(isinstance(each, str) for each in given)
    return [one_prompt(each) for each in given] if several else [one_prompt(given)]


def _biases(given: object) -> object:
    """Biases by token id or text, from a list of [token id or text, bias or false] or from an object."""
    if isinstance(given, dict):
        given = [[key, value] for key, value in given.items()]
    if not isinstance(given, list):
        raise ValueError("expected a list of pairs, or an object")  # noqa: TRY004 - pydantic takes no other
    found: dict[int | str, float] = {}
    for pair in given:
        if isinstance(pair, dict) and {"id", "bias"} <= pair.keys():  # one of OpenAI's entries, as replies have them
            pair = [pair["id"], pair["bias"]]
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int | str):
            raise ValueError("expected pairs of a token id or a text and a number or false")
        key, bias = pair
        if not (bias is False or (isinstance(bias, int | float) and not isinstance(bias, bool))):
            raise ValueError("expected a number, or false for never")
        value = -100.0 if bias is False else max(-100.0, min(100.0, float(bias)))
        found[int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key] = value
    return found


Anything = Annotated[Any, WithJsonSchema({})]
LlamaBias = Annotated[dict[Any, float], BeforeValidator(_biases), WithJsonSchema({"type": ["array", "object"]})]
LlamaPrompts = Annotated[
    list[Any], BeforeValidator(_llama_prompts), WithJsonSchema({"type": ["string", "array", "object"]})
]


def _seed(given: int) -> int | None:
    return None if given in RANDOM_SEEDS else given


LlamaSeed = Annotated[int, AfterValidator(_seed)]


def predicted(n_predict: int | None, otherwise: int | None) -> int | None:
    """Largest number of tokens of a reply, `otherwise` without `n_predict`; None means up to the end of the context."""
    if n_predict is None:
        return otherwise
    return None if n_predict < 0 else max(1, n_predict)
