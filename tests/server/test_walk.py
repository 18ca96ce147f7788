"""The functions that a request passes from the socket to the bytes, and that they do not become more.

A station is a function of the package that is on the stack while the request is read, is checked, is rendered, gets its
parameters, enters the engine, leaves it as a chunk, is worded, or is sent. What these functions call to do their own
work is no station. The engine's step, the tokenizer and the template are rooms of their own.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

import sametoken
from sametoken import embedded
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.completion import Chunk
from sametoken.engine.engine import Engine
from sametoken.engine.llm import LLM
from sametoken.options.sampling import SamplingParams
from sametoken.server.chat_words import ChatWords
from sametoken.server.completion_words import CompletionWords
from sametoken.server.messages_words import MessagesWords
from sametoken.server.responses_words import ResponsesWords
from sametoken.server.text_request import TextRequest
from server_checks import Running, running

PACKAGE = str(Path(sametoken.__file__).parent)
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
TEXT = {"prompt": "Hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
ASKED = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 6, "temperature": 0, "ignore_eos": True},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 6, "temperature": 0},
}
WORDS = (ChatWords, CompletionWords, ResponsesWords, MessagesWords)
WORDED = [f"{words.__module__.rpartition('.')[2]}.{words.__name__}" for words in WORDS]
MOST_STATIONS = 22  # of a request and its reply, each function once; the four methods of words are one station
MOST_CALLS = 20  # of functions of the package on the event loop, for one more chunk of a stream


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(LLM(embedded.target("embedded"))) as server:
        yield server


def stations_on_stack() -> Iterator[str]:
    """Functions of the package that led here, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and "<" not in code.co_name:
            yield f"{Path(code.co_filename).stem}.{code.co_qualname}"
        frame = frame.f_back


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Functions that were on the stack at one of the places, in the order in which they were seen first."""
    seen: list[str] = []

    def watch(owner: Any, name: str, own: bool = True, station: str = "") -> None:
        function = inspect.getattr_static(owner, name)
        bound = getattr(owner, name) if isinstance(function, classmethod) else function

        @wraps(bound)
        def watched(*values: Any, **named: Any) -> Any:
            here = [f"{bound.__module__.rpartition('.')[2]}.{station or bound.__qualname__}"] if own else []
            on_stack = (each for each in stations_on_stack() if each.rpartition(".")[0] not in WORDED)
            seen.extend(each for each in [*here, *on_stack][::-1] if each not in seen)
            return bound(*values, **named)

        monkeypatch.setattr(owner, name, staticmethod(watched) if isinstance(function, classmethod) else watched)

    for name in ("receive", "send"):
        watch(RequestResponseCycle, name, own=False)
    watch(json, "dumps", own=False)
    watch(Tokenizer, "encode", own=False)
    watch(SamplingParams, "from_mapping")
    watch(LLM, "requests")
    watch(AsyncLLM, "send")
    watch(AsyncLLM, "_hand_out")
    watch(asyncio.Queue, "get", own=False)
    watch(TextRequest, "__init__", own=False)
    watch(Engine, "add")
    watch(Chunk, "of")
    for words in WORDS:
        for name in ("first", "delta", "last", "whole"):
            watch(words, name, station=words.__name__)
    return seen


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_the_walk_has_few_stations(served: Running, walked: list[str], path: str, streams: bool) -> None:
    served.post(path, {**ASKED[path], "stream": streams})
    print(len(walked), *walked, sep="\n")
    assert {
        "exchange.Exchanges.__call__",
        "text_api.TextApi.endpoint.<locals>.answer",
        "async_llm.AsyncLLM._serve",
    } <= set(walked)
    assert len(walked) <= MOST_STATIONS


def test_no_generator_stands_between_engine_and_socket() -> None:
    files = [*Path(PACKAGE, "server").glob("*.py"), Path(PACKAGE, "engine", "async_llm.py")]
    found = [
        f"{file.name}: {function.name}"
        for file in files
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.AsyncFunctionDef)
        if any(isinstance(node, ast.Yield) for node in ast.walk(function))
    ]
    assert found == []


@pytest.mark.parametrize("path", ASKED)
def test_parameters_are_made_once(served: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    made: list[object] = []
    true = SamplingParams.from_mapping
    monkeypatch.setattr(SamplingParams, "from_mapping", lambda values: made.append(values) or true(values))
    served.post(path, ASKED[path])
    assert len(made) == 1


def calls_on_loop(server: Running, path: str, tokens: int) -> tuple[Counter[str], int]:
    """Calls of the package on the event loop while a stream of so many tokens is answered, and its number of chunks.

    A chunk without new text has no event in a chat.
    """
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    server.loop.call_soon_threadsafe(sys.setprofile, note)
    server.post(path, {**ASKED[path], "max_tokens": tokens, "stream": True})
    server.loop.call_soon_threadsafe(sys.setprofile, None)
    return calls, calls["worker.Job.saw"]


def calls_for_an_event(server: Running, path: str) -> dict[str, float]:
    """Calls of each function of the package on the event loop, for one more chunk of a stream."""
    (few, less), (many, more) = (calls_on_loop(server, path, tokens) for tokens in (8, 160))
    grown = {name: many[name] - few[name] for name in many}
    return {name: calls / (more - less) for name, calls in grown.items() if calls >= (more - less) / 2}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_event_costs_few_calls(served: Running, path: str) -> None:
    calls_on_loop(served, path, 8)
    # A loop that falls behind joins tokens in one event, and its counts vary: the least of five tries is the cost.
    each = min((calls_for_an_event(served, path) for _ in range(5)), key=lambda each: sum(each.values()))
    print(sum(each.values()), each)
    assert 10 < sum(each.values()) <= MOST_CALLS
