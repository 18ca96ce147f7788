"""Chat templates that llama.cpp collects from published models, rendered by us and by transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from conformance import results
from conformance.results import Result
from sametoken.checkpoint.chat import render

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
USER, ANSWER = {"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hello"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln"}}}
CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "abcdefghi"},
]
CONVERSATIONS: dict[str, tuple[list[Mapping[str, Any]], dict[str, Any]]] = {
    "a question": ([USER], {}),
    "a system message and a second question": ([{"role": "system", "content": "Be brief."}, USER, ANSWER, USER], {}),
    "thinking": ([USER, {**ANSWER, "reasoning_content": "hm", "thinking": "hm"}, USER], {}),
    "tools": ([USER], {"tools": TOOLS}),
    "a call and its result": ([USER, *CALLED], {"tools": TOOLS}),
    "a call of an earlier turn": ([USER, *CALLED, ANSWER, USER], {"tools": TOOLS}),
}


def compare(peer: str, templates: Path) -> list[Result]:
    """A result for every conversation, over all templates (`models/templates/*.jinja`).

    A message that only calls functions may have an empty content or null: one of transformers' two texts is expected.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    texts = [file.read_text(encoding="utf-8") for file in sorted(templates.glob("*.jinja"))]
    found = []
    for name, (messages, options) in CONVERSATIONS.items():
        variables = {
            "tools": None,
            "documents": None,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_generation_prompt": True,
            **options,
        }
        contents = [[{**each, "content": each["content"] or content} for each in messages] for content in ("", None)]
        equal = refused = 0
        for text in texts:
            template = _compile_jinja_template(text)
            expected = [_said(partial(template.render, **variables, messages=each)) for each in contents]
            said = _said(partial(render, {"default": text}, messages, variables))
            equal += said in expected
            refused += said is None and expected[0] is None
        words = f"{equal} of {len(texts)} equal, {refused} of them refused by both"
        found.append(
            results.judged(peer, f"chat templates: {name}", "text, with transformers", words, equal == len(texts))
        )
    return found


def _said(text: Callable[[], str]) -> str | None:
    try:
        return text()
    except Exception:  # a template refuses a conversation in many ways
        return None
