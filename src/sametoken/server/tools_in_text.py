"""Functions, their calls and results as plain messages, for chat templates that do not support them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sametoken.server.tools import CLOSE, OPEN

TemplateMessage = dict[str, Any]  # message for chat templates
INSTRUCTIONS = """You may call functions. Each line between <tools> tags describes one of them, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with nothing but its name and its arguments as JSON between <tool_call> tags:
{open}
{{"name": "...", "arguments": {{...}}}}
{close}
The result is in the next message. If no function is of use, answer in words."""


def tools_in_text(messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]]) -> list[TemplateMessage]:
    """Conversation with functions described in its system message, and with calls and results as texts.

    Args:
        messages: messages for chat templates, the oldest first.
        tools: functions for chat templates; empty if the conversation has only calls of earlier messages.
    """
    found = [_plain(message) for message in messages]
    if not tools:
        return found
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = INSTRUCTIONS.format(tools=listed, open=OPEN, close=CLOSE)
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0].get('content') or ''}\n\n{instructions}".lstrip()}, *found[1:]]
    return [{"role": "system", "content": instructions}, *found]


def _plain(message: TemplateMessage) -> TemplateMessage:
    """One message with its calls, or its result of a call, as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"{OPEN}\n{json.dumps(_call(each['function']), ensure_ascii=False)}\n{CLOSE}" for each in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message.get("content"), *texts)))}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}
