"""Histories with calls of functions and no text, as clients send them, in the ways that chat templates read them."""

from __future__ import annotations

import pytest

from sametoken.checkpoint.chat import render

CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
SAID = "{{ message.tool_calls[0].function.name }}"
TEMPLATES = {
    "splits the text (Qwen 3, Granite)": "{{ message.content.split('</think>')[-1] }}" + SAID,
    "adds to the text (Phi 3.5)": "{{ message.content + '|' }}" + SAID,
    "asks for null (DeepSeek-R1)": "{% if message.content is none %}"
    + SAID
    + "{% else %}{{ message.content }}{% endif %}",
    "asks whether it is there (Llama 3.1)": "{% if 'tool_calls' in message %}" + SAID + "{% endif %}",
}


@pytest.mark.parametrize("way", TEMPLATES)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=["absent", "null", "empty"])
def test_a_call_without_text_is_shown(way: str, content: dict[str, str | None]) -> None:
    user = "{% if message.role == 'user' %}{{ message.content }}:{% else %}"
    template = "{% for message in messages %}" + user + TEMPLATES[way] + "{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", **content, "tool_calls": [CALL]}]
    assert render({"default": template}, messages, {}).replace("|", "") == "u:weather"


def test_templates_that_show_no_calls_show_no_null() -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert render({"default": template}, messages, {}) == "[u][]"
