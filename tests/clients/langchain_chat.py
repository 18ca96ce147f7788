"""What a program with LangChain's ChatOpenAI sees of a server: langchain_chat.py URL MODEL REQUEST.

REQUEST is JSON: messages, settings of the model, and the JSON schema of a function. It prints an object with what each
way of asking came to.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def seen(message: AIMessage) -> dict[str, Any]:
    """The parts of a message that programs use."""
    told = message.response_metadata
    return {
        "text": message.content,
        "finish_reason": told["finish_reason"],
        "usage": message.usage_metadata,
        "calls": message.tool_calls,
    }


def streamed(model: ChatOpenAI, messages: list[Any]) -> dict[str, Any]:
    """A reply that is added up from its chunks by LangChain's own addition."""
    chunks = list(model.stream(messages))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return {**seen(whole), "chunks": len(chunks)}


def conversed(model: ChatOpenAI, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A call, its result, and the reply to that."""
    call = model.bind_tools([schema], tool_choice="required").invoke(text)
    result = ToolMessage("It will rain.", tool_call_id=call.tool_calls[0]["id"])
    reply = model.bind_tools([schema], tool_choice="none").invoke([HumanMessage(text), call, result])
    return {"call": seen(call), "reply": seen(reply)}


def refused(model: ChatOpenAI, text: str) -> dict[str, Any]:
    """The error of a request that the server does not take."""
    try:
        model.invoke(text)
    except openai.BadRequestError as error:  # LangChain's is a subclass
        return {"status": error.status_code, "param": error.param}
    raise AssertionError("the request was answered")


def main(url: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """All ways of asking, by name."""
    texts, schema = request["texts"], request["schema"]

    def chat(**settings: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=name, max_retries=0, **settings)

    model, formed = chat(**request["settings"]), chat(**request["formed"])
    return {
        "invoked": seen(model.invoke(texts[0])),
        "streamed": streamed(chat(**request["settings"], stream_usage=True), texts[0]),
        "batched": [seen(message) for message in model.batch(texts)],
        "conversed": conversed(formed, texts[0], schema),
        "structured": formed.with_structured_output(schema, method="json_schema", strict=True).invoke(texts[0]),
        "refused": refused(chat(temperature=-1), texts[0]),
    }


print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
