"""Several turns and loops of calls: what unmodified clients send back as history is taken, and read as curl's is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients_checks import CITIES, FORMED, HERE, HOME, PARAMETERS, PYTHON, SAMPLED, Served, said

TEXTS = ["What do you like to do for fun?", "I have a new dog!", "Tell me about the sea."]
SCHEMA = {"title": "forecast", "description": "The weather of the next days.", **PARAMETERS}


@pytest.mark.parametrize("client", ["openai_python", "litellm", "langchain"])
def test_turns_and_calls_go_back_as_the_client_has_them(served: Served, client: str) -> None:
    request = json.dumps({"texts": TEXTS, "settings": FORMED, "schema": SCHEMA})
    program = HERE / "conversations.py"
    told: Any = json.loads(said(PYTHON / "python", program, client, served.url, served.model, request))
    assert told["calls"]
    assert told["last"]
    for call in [*told["calls"], *told.get("responses", {}).get("calls", ())]:
        assert call["city"] in CITIES
        assert 1 <= call["days"] <= 9
    if client != "langchain":  # the agent has a call between
        messages: list[Any] = []
        for text, answer in zip(TEXTS, told["said"], strict=True):
            messages.append({"role": "user", "content": text})
            reply = served.curl("/v1/chat/completions", messages=messages, **FORMED)["choices"][0]["message"]
            assert answer == reply["content"] != ""
            messages.append({"role": "assistant", "content": answer})
    if client == "openai_python":
        assert told["responses"]["last"]


def test_nodes_runner_calls_and_goes_on(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}]
    body = {"messages": [{"role": "user", "content": TEXTS[0]}], "tools": tools, "tool_choice": "required", **FORMED}
    asked = {way: {"way": way, "body": body} for way in ("ran", "ran_streamed")}
    asked["conversed"] = {"way": "conversed", "body": {"texts": TEXTS, **SAMPLED}}
    modules = str(HOME / "node/node_modules")
    told: Any = json.loads(
        said("node", HERE / "openai_node.cjs", served.url, served.model, json.dumps(asked), NODE_PATH=modules)
    )
    for way in ("ran", "ran_streamed"):
        assert len(told[way]["calls"]) >= 2
        assert all(call["city"] in CITIES for call in told[way]["calls"])
        assert told[way]["roles"][:4] == ["user", "assistant", "tool", "assistant"]
    assert told["ran"]["calls"] == told["ran_streamed"]["calls"]
    assert len(told["conversed"]["said"]) == 3
    assert all(told["conversed"]["said"])
