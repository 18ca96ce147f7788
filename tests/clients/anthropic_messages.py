"""What a program with Anthropic's client sees of a server: anthropic_messages.py URL MODEL REQUEST.

REQUEST is JSON: turns of a user, sampling settings and a tool. It prints an object with what each way came to.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic


def seen(message: Any) -> dict[str, Any]:
    """The parts of a message that programs use."""
    used = message.usage
    blocks = [block.model_dump(include={"type", "text", "name", "input"}) for block in message.content]
    return {
        "blocks": blocks,
        "stop_reason": message.stop_reason,
        "input_tokens": used.input_tokens + (used.cache_read_input_tokens or 0),
        "output_tokens": used.output_tokens,
    }


def streamed(client: anthropic.Anthropic, **asked: Any) -> dict[str, Any]:
    """A reply that is added up by the client's own accumulator."""
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        return {**seen(stream.get_final_message()), "text": text}


def conversed(
    client: anthropic.Anthropic, turns: list[str], tool: dict[str, Any], **asked: Any
) -> list[dict[str, Any]]:
    """A call, its result, and two replies, each with everything before it as the client gave it."""
    said: list[Any] = [{"role": "user", "content": turns[0]}]
    call = client.messages.create(messages=said, tools=[tool], tool_choice={"type": "any"}, **asked)
    result = {"type": "tool_result", "tool_use_id": call.content[0].id, "content": "It will rain."}
    said += [{"role": "assistant", "content": call.content}, {"role": "user", "content": [result]}]
    found = [call]
    for text in turns[1:]:
        found.append(client.messages.create(messages=said, tools=[tool], tool_choice={"type": "none"}, **asked))
        said += [{"role": "assistant", "content": found[-1].content}, {"role": "user", "content": text}]
    return [seen(message) for message in found]


def refused(client: anthropic.Anthropic, **asked: Any) -> dict[str, Any]:
    """The error of a request for a model that is not there."""
    try:
        client.messages.create(**asked)
    except anthropic.NotFoundError as error:
        return {"status": error.status_code, "type": error.body["error"]["type"]}  # type: ignore[index]
    raise AssertionError("the request was answered")


def main(url: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """All ways of asking, by name."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    turns, said = request["turns"], [{"role": "user", "content": request["turns"][0]}]
    common = {"model": name, "max_tokens": request["max_tokens"], "extra_body": request["settings"]}
    return {
        "whole": seen(client.messages.create(messages=said, **common)),
        "streamed": streamed(client, messages=said, **common),
        "counted": client.messages.count_tokens(model=name, messages=said).input_tokens,
        "conversed": conversed(client, turns, request["tool"], **{**common, "max_tokens": 200}),
        "refused": refused(client, messages=said, **{**common, "model": "another"}),
    }


print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
