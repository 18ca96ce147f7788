"""Bodies of several megabytes: whatever they hold, other clients do not wait for them, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.server.body_size import MOST_VALUES, PIECE, counted
from server_checks import Running, running, with_template

MOST_WAIT = 0.1  # seconds that another client may wait
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.description }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tiny_pair: Pair, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = LLM(with_template(tiny_pair.target, tmp_path_factory.mktemp("chat"), TEMPLATE))
    with running(llm) as server:
        yield server


def body(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


SAID = [{"role": "user", "content": "abc"}]
FUNCTION = {"name": "f", "description": "x y" * 2_500_000}
REFUSED: dict[str, tuple[str, bytes]] = {
    "a long tool": (
        "/v1/chat/completions", body(messages=SAID, tools=[{"type": "function", "function": FUNCTION}], max_tokens=1)
    ),
    "long bad words": (
        "/v1/completions", body(prompt="a", bad_words=[str(i) * 50_000 for i in range(64)], max_tokens=1)
    ),
    "empty messages": ("/v1/chat/completions", body(messages=[{"role": "user", "content": ""}] * 200_000)),
    "empty objects": ("/v1/chat/completions", b'{"messages":[' + b"{}," * 30_000 + b"{}]}"),
    "many ids": ("/detokenize", body(tokens=[1] * 3_900_000)),
    "wrong ids": ("/detokenize", body(tokens=[-1] * 1_000_000)),
    "unknown keys": ("/detokenize", body(tokens=[1], **{f"k{i}": 1 for i in range(500_000)})),
    "some unknown keys": ("/detokenize", body(tokens=[1], **{f"k{i}": 1 for i in range(30_000)})),
    "a long text": ("/v1/completions", body(prompt="a b " * 1_900_000)),
    "a list of texts": ("/v1/completions", body(prompt=["a" * 7_000] * 1_024)),
    "a long field": ("/v1/completions", body(prompt="a", user=["x" * 7_900_000])),
    "not JSON": ("/v1/completions", b"[" * 7_900_000),
}  # fmt: skip


class Heart:
    """How long the server's event loop was held up, at most."""

    def __init__(self, server: Running) -> None:
        self.longest, self._on = 0.0, True
        self._beats = asyncio.run_coroutine_threadsafe(self._beat(), server.loop)

    async def _beat(self) -> None:
        while self._on:
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            self.longest = max(self.longest, time.perf_counter() - before)

    def stop(self) -> float:
        self._on = False
        self._beats.result(10)
        return self.longest


@pytest.mark.parametrize("name", REFUSED)
def test_nobody_waits_for_a_large_body(server: Running, name: str) -> None:
    path, content = REFUSED[name]
    waited = []
    for _ in range(3):  # the machine may be busy with something else
        heart, begin = Heart(server), time.monotonic()
        answer = server.client.post(path, content=content, headers={"content-type": "application/json"})
        waited.append(heart.stop())
        assert time.monotonic() - begin < 10
        assert answer.status_code in (400, 413), answer.text[:200]
        assert len(answer.content) < 2000
        if waited[-1] < MOST_WAIT:
            return
    pytest.fail(f"the event loop stood still for {min(waited):.2f} s")


def test_a_long_list_of_ids_is_answered_without_others_waiting(server: Running) -> None:
    ids = [5] * 300_000
    heart = Heart(server)
    told = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    again = server.post("/tokenize", {"prompt": told[:500_000], "return_token_strs": True}).json()
    assert heart.stop() < 3 * MOST_WAIT
    assert len(again["tokens"]) == again["count"] == len(again["token_strs"])
    assert again["tokens"] == server.llm.tokenizer.encode(told[:500_000])


def test_the_counts_are_those_of_the_values() -> None:
    draw = random.Random(1)
    for size in (0, 10, PIECE):
        for _ in range(20):
            texts = ["".join(draw.choice('ab\\"{[:,é') for _ in range(size + draw.randrange(9))) for _ in range(3)]
            told = {"a": texts, "b": {texts[0] + "x": [1, 2, {"c": {}}]}}
            found = counted(json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode())
            assert found == (4, 4, 1 + 2 + 1 + 2 + 1 + 1 + 3 - 2 + 2)
    assert counted(b"[" + b"1," * MOST_VALUES + b"1]").values == MOST_VALUES + 1
