"""Separation of training data and held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

from sametoken.data.held_out import RUN, HeldOutRuns, divide, sort_lines
from sametoken.prompts.conversations import read_records


def encode(text: str) -> list[int]:
    return [sum(map(ord, word)) for word in text.split()]


def conversations(place: Path, *texts: str) -> Path:
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}] for text in texts]
    lines = [json.dumps({"id": f"{number}", "messages": each, "category": "chat"}) for number, each in enumerate(turns)]
    place.write_text("\n".join(lines), encoding="utf-8")
    return place


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_runs_of_tokens_are_found_whatever_is_around_them(tmp_path):
    words = [f"word{number}" for number in range(20)]
    runs = HeldOutRuns(conversations(tmp_path / "held-out.jsonl", " ".join(words), "How are you?"), encode)
    assert runs.shares(asks("now " + " ".join(words[3 : 3 + RUN]).upper() + "! and more"))
    assert not runs.shares(asks("now " + " ".join(words[3 : 2 + RUN]) + " and more"))
    assert runs.shares(asks("how are you"))
    assert not runs.shares(asks("how are you today"))
    assert not runs.shares([{"role": "assistant", "content": "how are you"}])


def test_given_conversations_are_divided_once(tmp_path):
    file = conversations(tmp_path / "data.jsonl", *(f"question {number}" for number in range(40)))
    places = tmp_path / "held", tmp_path / "first", tmp_path / "second"
    assert divide([file], 80, places) == (4, 36)
    parts = [[record.id for record in read_records(place)] for place in places]
    assert parts[0] == ["0", "10", "20", "30"]
    assert sorted((id for part in parts for id in part), key=int) == [str(number) for number in range(40)]
    assert abs(len(parts[1]) - len(parts[2])) <= 4
    assert next(iter(read_records(places[0]))).rest == {"category": "chat"}


def test_lines_are_sorted_by_id(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"conversation_id": "b", "x": 1}\n{"conversation_id": "a"}\n')
    sort_lines(file)
    assert file.read_text() == '{"conversation_id": "a"}\n{"conversation_id": "b", "x": 1}\n'
