"""`sametoken chat`: what it says is what the engine says plainly, in this process and from a server, piped too."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_checks import Pair
from sametoken import LLM, SamplingParams
from sametoken.commands.chat_clients import TokenPrinter, raw
from sametoken.engine.engine import Engine
from sametoken.server.replies import spelled
from server_checks import running

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = ("--max-tokens", "12", "--temperature", "0.8", "--seed", "3")
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3)


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def answers(llm: LLM, *turns: str) -> list[str]:
    """Those of a conversation."""
    messages: list[Any] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": llm.chat(messages, PARAMS)[0].text})
    return [each["content"] for each in messages[1::2]]


@pytest.fixture(scope="module")
def plain(tiny_pair: Pair) -> LLM:
    return LLM(tiny_pair.target)


def test_a_piped_conversation_is_what_the_engine_says(
    run: Any, pair: Pair, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "hi", "and you", "/reset", "/plain", "hi", "/quit", "never asked")
    code, out, err = run("chat", pair.target, "--draft", pair.draft, *ASKED)
    said = answers(plain, "hi", "and you")
    assert (code, out) == (0, "".join(f"{text}\n" for text in [*said, said[0]]))
    figures = [line for line in err.splitlines() if "acceptance length" in line]
    assert len(figures) == 3
    assert figures[2].endswith("acceptance length 1.00")
    assert "drafts are off" in err


def test_bytes_that_are_no_text_end_no_conversation(run: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = io.TextIOWrapper(io.BytesIO(b"\xff\xfe hi\nhello\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", sent)
    answer = run("chat", pair.target, "--max-tokens", "3", "--no-color")
    assert answer.code == 0
    assert answer.err.count("3 tokens,") == 2


def test_an_input_that_is_closed_is_an_end(run: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run("chat", pair.target)[:2] == (0, "")


def test_a_server_says_the_same(run: Any, pair: Pair, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "hi", "and you", "/what")
    with running(LLM(pair.target, pair.draft), api_key=["secret"]) as server:
        code, out, err = run("chat", "--url", server.url, "--api-key", "secret", *ASKED)
        assert (code, out) == (0, "".join(f"{text}\n" for text in answers(plain, "hi", "and you")))
        assert "/what: unknown" in err
        say(monkeypatch, "hi")
        code, out, err = run("chat", "--url", server.url, *ASKED)
        assert (code, out) == (0, "")
        assert "API key is missing or wrong" in err
    say(monkeypatch, "hi")
    _, out, err = run("chat", "--url", server.url, *ASKED)
    assert out == ""
    assert "is the server running?" in err


def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    run: Any, pair: Pair, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "hi", "/reset", "hi")
    step, begun = Engine.step, threading.Event()

    def interrupted(engine: Engine) -> Any:
        if not begun.is_set():
            begun.set()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # the main thread hears of it before the answer has ended
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        code, out, err = run("chat", pair.target, *ASKED)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0
    assert "stopped" in err
    monkeypatch.setattr(Engine, "step", step)
    assert out.endswith(answers(plain, "hi")[0] + "\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_interrupt_at_the_prompt_drops_the_line_and_not_the_conversation(
    run: Any, pair: Pair, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[Any] = ["hi", KeyboardInterrupt(), KeyboardInterrupt(), "and you", EOFError()]

    def line(prompt: str) -> str:
        key = typed.pop(0)
        if isinstance(key, BaseException):
            raise key
        return str(key)

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", line)
    code, out, err = run("chat", pair.target, *ASKED)
    assert (code, out) == (0, "".join(f"{text}\n" for text in answers(plain, "hi", "and you")))
    assert err.count("/quit or Ctrl-D ends") == 3


@pytest.mark.parametrize(
    ("given_options", "words"),
    [
        (("--url", "http://localhost:1", "--draft", "x"), "--draft is for a model in this process"),
        (("--api-key", "k"), "--api-key is for a server"),
        (("--temperature", "-1"), "temperature"),
        (("--url", "ftp://x"), "expected a URL"),
    ],
)
def test_options_that_nothing_would_read_are_refused(run: Any, given_options: Sequence[str], words: str) -> None:
    code, _, err = run("chat", *given_options)
    assert code == 2
    assert words in err


@given(st.lists(st.tuples(st.binary(max_size=4), st.booleans()), max_size=20))
def test_colours_follow_the_tokens_and_never_change_the_text(tokens: list[tuple[bytes, bool]]) -> None:
    class Spells:
        def token_bytes(self, token: int) -> bytes:
            return tokens[token][0]

    for index, (given_bytes, _) in enumerate(tokens):
        try:
            given_bytes.decode()
        except UnicodeDecodeError:
            assert raw(spelled(Spells(), index)) == given_bytes
    text = b"x" + b"".join(each for each, _ in tokens)
    text = text.decode("utf-8", "replace")
    origins = [False, *(drafted for _, drafted in tokens)]
    piece = TokenPrinter().add(text, [b"x", *(each for each, _ in tokens)], origins)
    assert piece.text == text


def test_text_that_lags_keeps_its_colours() -> None:
    printer = TokenPrinter()
    first = printer.add("ab", [b"ab", b"\xe2\x82"], [False, True])
    second = printer.add("\u20ac!", [b"\xac", b"!"], [True, False])
    assert first.runs == [("ab", False)]
    assert second.runs == [("\u20ac", True), ("!", False)]
    assert second.figures.startswith("4 tokens")
    assert second.figures.endswith("acceptance length 2.00")
