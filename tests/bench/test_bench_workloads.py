"""Workloads in the formats of published benchmarks, recognised by their keys; mistakes are named with their place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken import SametokenError
from sametoken.bench.workloads import fit, read_workload
from sametoken.commands.given import given_prompts
from sametoken.prompts.sources import BUILT_IN, Conversation

SPEC_BENCH = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 2, "category": "writing", "turns": ["Write more."]},
    {"question_id": 3, "category": "math", "turns": ["What is 1 + 1?"], "reference": ["2"]},
]
HUMAN_EVAL = [{"task_id": "H/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""}]
GSM8K = [{"question": "How many eggs?", "answer": "#### 18"}]
OWN = [{"prompt": "a", "category": "odd"}, {"prompt": "b"}]
CHATS = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]

ANSWERED = [  # by `sametoken synthesize`
    {"conversation_id": "a", "conversations": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "x"}],
     "truncated": True, "category": "travel"}
]  # fmt: skip


def written(tmp_path: Path, entries: list[Any]) -> str:
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return str(file)


def turn(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("entries", "label", "first"),
    [
        (SPEC_BENCH, "spec-bench", ("writing", turn("Write."), ("Again.",))),
        (HUMAN_EVAL, "humaneval", ("code", "def f():\n", ())),
        (GSM8K, "gsm8k", ("math", turn("How many eggs?"), ())),
        (OWN, "prompts", ("odd", "a", ())),
        (CHATS, "conversations", ("all", Conversation(CHATS[0]["messages"]), ())),
        (ANSWERED, "conversations", ("travel", turn("u"), ())),
    ],
)
def test_a_format_is_recognised_by_its_keys(tmp_path: Path, entries: list[Any], label: str, first: object) -> None:
    found = read_workload(written(tmp_path, entries), turns=2)
    assert (found.name, found.format, len(found.items)) == ("some", label, len(entries))
    assert tuple(found.items[0]) == first


def test_what_generate_takes_bench_takes_and_the_other_way_round(tmp_path: Path, capsys: Any) -> None:
    """One file with every form, in the words of `generate --prompts` and of `bench --workload`."""
    entries = [*SPEC_BENCH, *HUMAN_EVAL, *GSM8K, *OWN, *CHATS, {"turns": ["No category."]}]
    file = written(tmp_path, entries)
    found = read_workload(file)
    assert found.format == "spec-bench, humaneval, gsm8k, prompts, conversations"
    assert given_prompts((), file, chat=False) == [item.source for item in found.items]
    assert "1 of 9 prompts have more than one turn; only the first is asked" in capsys.readouterr().err


def test_the_built_in_prompts_have_categories() -> None:
    found = read_workload("builtin")
    assert len(found.items) == len(BUILT_IN)
    assert {"chat", "prose", "code", "repetition"} <= {item.category for item in found.items}


def test_limits_categories_and_turns(tmp_path: Path) -> None:
    file = written(tmp_path, SPEC_BENCH)
    assert [item.category for item in read_workload(file, limit=2).items] == ["writing", "math"]
    assert [item.later for item in read_workload(file, turns=1).items] == [(), (), ()]
    assert [item.category for item in read_workload(file, categories=["math"]).items] == ["math"]
    assert len(read_workload(file, limit=99).items) == 3


BAD = [
    ([{"text": "a", "id": 3}], "line 1: unknown format with the keys id, text; known formats"),
    ([{}], "line 1: no message of a user"),
    ([*SPEC_BENCH, {"text": "a"}], "line 4: unknown format with the keys text"),
    ([{"conversations": [{"from": "nobody", "value": "u"}]}], "line 1, message 1: the role is 'nobody'"),
    ([{"conversations": [{"role": "assistant", "content": "u"}]}], "line 1: no message of a user"),
    ([{"prompt": "a", "messages": []}], "line 1: no message of a user"),
    ([{"category": "a", "turns": []}], "line 1: turns is '[]'"),
    ([{"category": "a", "turns": [3]}], "line 1: turn 1 is 3"),
    ([{"category": 1, "turns": ["a"]}], "category is 1"),
    ([{"question": "", "answer": "b"}], "question is ''"),
    ([{"prompt": "a", "max_tokens": 3}], "unknown key 'max_tokens'"),
    (["a"], "line 1: got a, expected an object with prompt, messages"),
]


@pytest.mark.parametrize(("entries", "words"), BAD)
def test_what_is_no_workload_is_named_with_its_line(tmp_path: Path, entries: list[Any], words: str) -> None:
    with pytest.raises(SametokenError) as error:
        read_workload(written(tmp_path, entries))
    assert words in str(error.value)


def test_an_unknown_category_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SametokenError, match="did you mean 'writing'"):
        read_workload(written(tmp_path, SPEC_BENCH), categories=["writng"])
    with pytest.raises(SametokenError, match="--workload no/such: No such file"):
        read_workload("no/such")


class Hub:
    """Stands for the library that reads datasets."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.asked = rows, []  # type: ignore[var-annotated]

    def load_dataset(self, name: str, *, split: str, streaming: bool) -> Any:
        self.asked.append((name, split, streaming))
        if not self.rows:
            raise ConnectionError("no route")
        return iter(self.rows)


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([*GSM8K, *GSM8K])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=hub.load_dataset))
    assert read_workload("hf:openai/gsm8k").format == "gsm8k"
    named = read_workload("hf:openai/gsm8k:train:answer", limit=1)
    assert (named.format, named.items[0].source) == ("column answer", turn("#### 18"))
    assert hub.asked == [("openai/gsm8k", "test", True), ("openai/gsm8k", "train", True)]
    with pytest.raises(SametokenError, match="did you mean 'answer'"):
        read_workload("hf:openai/gsm8k:train:anwser")
    hub.rows = []
    with pytest.raises(SametokenError, match="ConnectionError: no route; expected a dataset"):
        read_workload("hf:openai/gsm8k")
    for name in ("hf:", "hf:a/b:c:d:e"):
        with pytest.raises(SametokenError, match="expected hf:org/name"):
            read_workload(name)


def test_without_the_library_the_command_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SametokenError, match="pip install datasets"):
        read_workload("hf:openai/gsm8k")


@given(st.lists(st.integers(), min_size=1, max_size=9), st.integers(1, 40))
def test_prompts_are_cut_or_repeated_to_a_length(ids: list[int], length: int) -> None:
    found = fit(ids, length)
    assert len(found) == length
    assert all(token == ids[place % len(ids)] for place, token in enumerate(found))
    assert fit(ids, None) == ids
