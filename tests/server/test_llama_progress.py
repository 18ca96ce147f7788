"""Progress of a prompt in llama-server's streams: while it is read, and with the first event of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from sametoken.options.sampling import SamplingParams
from sametoken.server import reply
from sametoken.server.llama.schema import NativeRequest, Telemetry
from sametoken.server.llama.words import LlamaWords, NativeWords
from sametoken.server.measured import MeasuredWords
from sametoken.server.reply import EventStream


def test_progress_comes_with_the_first_event_of_a_reply() -> None:
    request = Mock(prompt_ids=[1, 2], cached_tokens=0, first_token=1.0, arrived=0.5, params=Mock(n=1))
    inner = Mock()
    inner.first.return_value = [{"type": "response.in_progress"}]
    inner.delta.side_effect = [[], [{"type": "response.output_text.delta"}], [{"type": "response.output_text.delta"}]]
    body = Telemetry(return_progress=True)
    words = LlamaWords(inner, body, Mock(requests=[request]), Mock(), verbose=False)
    words.first()
    chunk = Mock(index=0, choice=0, completion=None)
    made = [words.delta(chunk) for _ in range(3)]  # the first holds a mark of thinking, which is no text
    assert [["prompt_progress" in event for event in events] for events in made] == [[], [True, True, False], [False]]


def states(events: Iterable[Mapping[str, Any]]) -> list[int]:
    return [event["prompt_progress"]["processed"] for event in events if "prompt_progress" in event]


@pytest.mark.parametrize("native", [True, False])
def test_progress_comes_while_a_prompt_is_read(native: bool) -> None:
    request = Mock(
        prompt_ids=[1] * 9, tokens=[1] * 9, cached_tokens=2, committed=0, seated=None, first_token=None, finished=None,
        arrived=0.5, params=Mock(n=1),
    )  # fmt: skip
    inner, source = Mock(), Mock(requests=[request])
    inner.first.return_value = [{"type": "response.in_progress"}]
    inner.delta.return_value = [{"type": "response.output_text.delta"}]
    body = NativeRequest(prompt="x", return_progress=True, timings_per_token=True)
    words: Any = NativeWords(body, source, Mock()) if native else LlamaWords(inner, body, source, Mock(), verbose=False)
    words.first()
    told = [states(words.reading())]  # it waits for a place
    request.seated = 0.5
    for request.committed in (2, 6, 6, 9):  # at the end of the prompt the reply has the last state
        told.append(states(words.reading()))
    chunk = Mock(index=0, choice=0, completion=None, token_ids=[], text="")
    assert [*told, states(words.delta(chunk)), states(words.delta(chunk))] == [[], [2], [6], [], [], [9], []]


def test_events_about_a_prompt_end_before_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "READING_S", 0.001)
    asyncio.run(_tell_and_reply())


async def _tell_and_reply() -> None:
    sent, told = list[bytes](), asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def chunks() -> AsyncIterator[Any]:
        await told.wait()
        yield Mock(completion=None)
        told.clear()
        await asyncio.sleep(0.05)

    def reading() -> list[dict[str, str]]:
        told.set()
        return [{"about": "prompt"}]

    words = Mock(reading=reading, **{"first.return_value": [], "delta.return_value": [{"about": "reply"}]})
    stream = EventStream(Mock(chunks=chunks(), requests=[Mock(params=SamplingParams())]), words, {}, anthropic=False)
    await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    said = [line for line in b"".join(sent).splitlines() if line.startswith(b"data: {")]
    assert said[:1] == [b'data: {"about":"prompt"}']
    assert said[-1] == b'data: {"about":"reply"}'
    assert not told.is_set()


def test_progress_comes_beside_metrics_of_the_request() -> None:
    """--enable-per-request-metrics puts its figures around the words of any reply."""
    request = Mock(prompt_ids=[1], params=Mock(n=1))
    inner = LlamaWords(Mock(), Telemetry(return_progress=True), Mock(requests=[request]), Mock(), verbose=False)
    assert inner.reading is not None
    assert MeasuredWords(inner, request).reading == inner.reading
