"""Conversations of several turns and loops of calls by unmodified clients: conversations.py CLIENT URL MODEL REQUEST.

REQUEST is JSON: texts of the user, settings, and the JSON schema of a function. What a client was told is sent back as
the client itself makes it. It prints an object with what was said and called.
"""

from __future__ import annotations

import json
import sys
from typing import Any

URL, MODEL, REQUEST = sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
TEXTS, SETTINGS, SCHEMA = REQUEST["texts"], REQUEST["settings"], REQUEST["schema"]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "forecast", "strict": True, "parameters": SCHEMA}}]


def rain(city: str, days: int) -> str:
    return f"It will rain in {city} for {days} days."


def openai_python() -> dict[str, Any]:
    """OpenAI's: dumped messages, `parse`, the accumulator of streams, and /v1/responses."""
    from openai import OpenAI
    from pydantic import BaseModel, ConfigDict

    class Forecast(BaseModel):
        model_config = ConfigDict(extra="forbid")
        city: str
        days: int

    client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    said, messages = [], []
    for text in TEXTS:
        messages.append({"role": "user", "content": text})
        reply = client.chat.completions.create(model=MODEL, messages=messages, **SETTINGS).choices[0].message
        said.append(reply.content)
        messages.append(reply.model_dump())
    calls = []
    messages = [{"role": "user", "content": TEXTS[0]}]
    asked = {"model": MODEL, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **SETTINGS}
    for way in ("parse", "stream", "create"):
        if way == "parse":
            message: Any = client.chat.completions.parse(messages=messages, **asked).choices[0].message
        elif way == "stream":
            with client.chat.completions.stream(messages=messages, **asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            calls.append(arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": rain(**arguments)})
    last = client.chat.completions.create(model=MODEL, messages=messages, **SETTINGS)
    parsed = (
        client.chat.completions.parse(model=MODEL, messages=messages[:1], response_format=Forecast, **SETTINGS)
        .choices[0]
        .message
    )
    client.chat.completions.create(model=MODEL, messages=[*messages[:1], parsed, *messages[:1]], **SETTINGS)
    return {"said": said, "calls": calls, "last": last.choices[0].message.content, "responses": responses(client)}


def responses(client: Any) -> dict[str, Any]:
    """The same loop in the newer form; output items are sent back as they came."""
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    more = {"temperature": SETTINGS["temperature"], "extra_body": {"seed": SETTINGS["seed"]}}
    items: list[Any] = [{"role": "user", "content": TEXTS[0]}]
    calls = []
    for _ in range(2):
        asked = {"model": MODEL, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, **more}
        with client.responses.stream(input=items, **asked) as stream:
            output = stream.get_final_response().output
        items += output
        for call in output:
            arguments = json.loads(call.arguments)
            calls.append(arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": rain(**arguments)})
    reply = client.responses.create(model=MODEL, input=items, max_output_tokens=SETTINGS["max_tokens"], **more)
    again = [*items, *reply.output, {"role": "user", "content": TEXTS[1]}]
    client.responses.create(model=MODEL, input=again, max_output_tokens=8, **more)
    return {"calls": calls, "last": reply.output_text}


def litellm() -> dict[str, Any]:
    """litellm's completions: whole messages and messages rebuilt from chunks go back as they are."""
    import litellm as client

    client.telemetry = False
    about = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0, **SETTINGS}
    said, messages = [], []
    for text in TEXTS:
        messages.append({"role": "user", "content": text})
        message = client.completion(messages=messages, **about).choices[0].message
        said.append(message.content)
        messages.append(message.model_dump())
    messages, calls = [{"role": "user", "content": TEXTS[0]}], []
    asked = {**about, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for stream in (False, True, True):
        if stream:
            chunks = list(client.completion(messages=messages, stream=True, **asked))
            message = client.stream_chunk_builder(chunks, messages=messages).choices[0].message
        else:
            message = client.completion(messages=messages, **asked).choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            calls.append(arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": rain(**arguments)})
    last = client.completion(messages=messages, **about).choices[0].message
    return {"said": said, "calls": calls, "last": last.content}


def langchain() -> dict[str, Any]:
    """LangChain's agent, which has to call once and then to answer."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    @wrap_model_call
    def once(request: Any, handler: Any) -> Any:
        answered = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(tool_choice="none" if answered else "required"))

    calls: list[Any] = []

    def forecast(city: str, days: int) -> str:
        calls.append({"city": city, "days": days})
        return rain(city, days)

    tool = StructuredTool.from_function(forecast, name="forecast", description="The weather.", args_schema=SCHEMA)
    model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, **SETTINGS)
    agent = create_agent(model, [tool], middleware=[once])
    told = agent.invoke({"messages": [("user", TEXTS[0])]})["messages"]
    more = agent.invoke({"messages": [*told, ("user", TEXTS[1])]})["messages"]
    return {"calls": calls, "last": told[-1].content, "said": [told[-1].content, more[-1].content]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
