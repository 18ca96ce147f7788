"""Which replica takes a request, from what they have open and have read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sametoken.replicas.routing import BLOCK, OPEN_SEQUENCE, Candidate, PrefixMemory, choose, prompt_of

LONG = 40 * BLOCK


def candidate(number: int, sequences: int = 0, unread: int = 0, known: int = 0, remembered: int = 0) -> Candidate:
    return Candidate(number, sequences, unread, known, remembered)


@pytest.mark.parametrize(
    ("candidates", "taken"),
    [
        ([candidate(0, remembered=9), candidate(1)], 1),  # of equals the one that remembers least
        ([candidate(0), candidate(1)], 0),
        ([candidate(0, sequences=1), candidate(1)], 1),
        ([candidate(0, sequences=2), candidate(1, sequences=1, unread=2 * OPEN_SEQUENCE)], 0),
        ([candidate(0), candidate(1, known=LONG)], 1),
        ([candidate(0), candidate(1, sequences=9, known=LONG)], 1),  # its beginning is worth more
        ([candidate(0), candidate(1, sequences=11, known=LONG)], 0),  # now the other has less work
        ([candidate(0), candidate(1, known=LONG // 4, remembered=5)], 0),  # less than half of the prompt
        ([candidate(0), candidate(1, known=LONG // 2, remembered=5)], 1),
    ],
)
def test_the_replica_with_the_least_work_is_chosen(candidates: list[Candidate], taken: int) -> None:
    assert choose(candidates, LONG) == taken


def chat(*contents: str, **more: Any) -> bytes:
    return json.dumps({**more, "messages": [{"role": "user", "content": each} for each in contents]}).encode()


def test_a_conversation_that_goes_on_is_known() -> None:
    memory = PrefixMemory(tokens=10_000)
    first = prompt_of(chat("a" * 1000, model="m", temperature=0))
    memory.add(first.blocks)
    again = prompt_of(chat("a" * 1000, "and then?", seed=3))
    assert memory.known(again.blocks) == len(first.blocks) * BLOCK > 1000 - BLOCK
    assert memory.known(prompt_of(chat("b" * 1000)).blocks) == 0
    assert memory.known(prompt_of(chat("a" * 1000, tools=[{"type": "function"}])).blocks) == 0


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    memory = PrefixMemory(tokens=10 * BLOCK // 4)  # ten blocks
    old, new = prompt_of(chat("a" * 8 * BLOCK)), prompt_of(chat("b" * 4 * BLOCK))
    memory.add(old.blocks)
    memory.add(new.blocks)
    assert memory.known(new.blocks) == len(new.blocks) * BLOCK
    assert memory.known(old.blocks) == (10 - len(new.blocks)) * BLOCK
    assert len(memory) == 10


def test_nothing_is_known_where_the_cache_keeps_nothing() -> None:
    memory = PrefixMemory(tokens=0)
    memory.add(prompt_of(chat("a" * 1000)).blocks)
    assert len(memory) == 0


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [], "n": -1}, 1),
        ({"messages": "?", "n": "many"}, 1),
        ({"prompt": "a", "n": 10**9}, 1024),
    ],
)
def test_sequences_of_a_request_are_counted(body: Any, sequences: int) -> None:
    assert prompt_of(json.dumps(body).encode()).sequences == sequences


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'"\\ud800"'])
def test_a_body_that_is_no_request_has_a_size_only(body: bytes) -> None:
    assert prompt_of(body) == ((), len(body), 1)


def test_text_that_is_no_unicode_has_blocks() -> None:
    assert prompt_of(b'{"prompt": "' + b"\\ud800" * 200 + b'"}').blocks


def test_nesting_that_can_be_read_but_not_written_is_no_error() -> None:
    for depth in range(700, 1000):
        assert prompt_of(b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}").size > 0
