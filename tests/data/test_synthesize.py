"""Synthesis: what is asked, what is written, and that neither order, batch, failures nor kill -9 change a text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import socket
from threading import Event, Thread
from typing import Any

import pytest

from cli_checks import Pair
from fake_server import serving
from sametoken import LLM, SamplingParams
from sametoken.client.client import Client
from sametoken.commands.options import Option, joined_words
from sametoken.data.answers import AnswerSampling, NoAnswerError, ServerAnswers
from sametoken.data.synthesize import HOPELESS, read_tasks
from sametoken.prompts.sources import as_turn

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def talk(name: object, *texts: str) -> Row:
    """A conversation in which every text got the answer "old"."""
    return {"id": name, "messages": [turn for text in texts for turn in (user(text), assistant("old"))]}


def write(file: Path, *rows: Row) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def answers(entry: Row) -> list[str]:
    return [turn["content"] for turn in entry["conversations"] if turn["role"] == "assistant"]


class Place:
    """A directory with data and output, and the command on them."""

    def __init__(self, root: Path, run: Any) -> None:
        self.data, self.out = root / "in.jsonl", root / "out.jsonl"
        self.failed = root / "out.jsonl.failed.jsonl"
        self._run = run

    def __call__(self, *options: str) -> Any:
        return self._run("synthesize", "--data", str(self.data), "--output", str(self.out), *options)

    def rows(self) -> dict[str, Row]:
        """The output by id, every id once."""
        rows = read(self.out)
        found = {row["conversation_id"]: row for row in rows if row != {"finished": True}}
        assert len(found) == sum(row != {"finished": True} for row in rows)
        return found


@pytest.fixture
def place(tmp_path: Path, run: Any) -> Place:
    return Place(tmp_path, run)


# --- what is asked and what is written


def test_every_turn_is_answered_anew_after_the_new_answers(place: Place) -> None:
    write(place.data, {**talk("a", "one", "two"), "category": "chat"}, {"id": 7, "messages": [user("three")]})
    with serving() as (url, state):
        done = place._run(
            "synthesize", "--data_path", str(place.data), "--output_path", str(place.out), "--url", url + "/v1",
            "--api_key", "token-abc123", "--max_token", "9", "--chat", "--num_threads", "1", "--temperature", "0.5",
            "--system_prompt", "You", "are", "brief.",
        )  # fmt: skip
    assert done.code == 0
    system = {"role": "system", "content": "You are brief."}
    first, second = assistant("answer 2 to one"), assistant("answer 4 to two")
    whole = [system, user("one"), first, user("two"), second]
    assert [body["messages"] for body in state.bodies] == [whole[:2], whole[:4], [system, user("three")]]
    assert {(b["model"], b["temperature"], b["max_tokens"], b["stream"]) for b in state.bodies} == {
        ("canned", 0.5, 9, False)
    }
    assert len({body["seed"] for body in state.bodies}) == 3
    assert (set(state.keys), set(state.paths)) == ({"Bearer token-abc123"}, {"/v1/chat/completions"})
    assert read(place.out) == [
        {"conversation_id": "a", "conversations": whole, "category": "chat"},
        {"conversation_id": "7", "conversations": [system, user("three"), assistant("answer 2 to three")]},
    ]
    assert "2 conversations written, 0 of them cut by length" in done.out
    assert done.err == ""


def test_own_system_turns_tools_and_odd_orders(place: Place) -> None:
    own, call = {"role": "system", "content": "Own."}, assistant("", tool_calls=[{"id": "c"}])
    tool = {"role": "tool", "content": "42"}
    write(
        place.data,
        {"id": "own", "messages": [own, user("a")]},
        {"id": "tool", "messages": [own, user("a"), call, tool, assistant("old"), user("b"), call]},
        {"id": "first", "messages": [assistant("hello"), user("a"), user("b"), assistant("x"), assistant("y")]},
        {"id": "late", "messages": [user("a"), own, assistant("x"), own]},
    )
    with serving() as (url, _):
        assert place("--url", url, "--system_prompt", "Mine.").code == 0
    mine = {"role": "system", "content": "Mine."}
    assert {name: row["conversations"] for name, row in place.rows().items()} == {
        "own": [own, user("a"), assistant("answer 2 to a")],
        "tool": [own, user("a"), call, tool, assistant("answer 4 to 42")],
        "first": [mine, user("a"), user("b"), assistant("answer 3 to b")],
        "late": [mine, user("a"), own, assistant("answer 3 to Own.")],
    }


def test_a_cut_answer_is_kept_and_marked_and_ends_the_conversation(place: Place) -> None:
    write(place.data, talk("a", "one", "LONG", "three"))
    with serving() as (url, state):
        assert "1 of them cut by length" in place("--url", url).out
        assert len(state.bodies) == 2
        assert "nothing left" in place("--url", url).out
        assert len(state.bodies) == 2
    (row,) = place.rows().values()
    assert row["truncated"] is True
    assert row["conversations"][-1] == assistant("answer 3 to LONG")


def test_plain_prompts_are_completed_as_texts(place: Place) -> None:
    cut = {"prompt": "Once", "truncated": True, "conversations": []}
    write(place.data, {"id": "p", **cut}, {"text": "LONG ago", "kind": "b"}, talk("c", "one", "two"))
    with serving() as (url, state):
        assert place("--url", url, "--no-chat", "--num_threads", "1").code == 0
        assert place("--url", url, "--no-chat").out.endswith("3 conversations, nothing left to answer\n")
        assert "chat = false, now it is true" in place("--url", url).err
    assert set(state.paths) == {"/v1/completions"}
    assert read(place.out) == [
        {"conversation_id": "p", "prompt": "Once", "text": "Onceanswer 1 to Once", "conversations": []},
        {"conversation_id": "2", "prompt": "LONG ago", "text": "LONG agoanswer 1 to LONG ago", "truncated": True}
        | {"kind": "b"},
        {"conversation_id": "c", "prompt": "one", "text": "oneanswer 1 to one"},
    ]


def test_empty_conversations_are_logged_when_asked(place: Place) -> None:
    write(place.data, {"id": "e", "messages": []}, {"id": "s", "messages": [assistant("hello")]}, talk("a", "one"))
    with serving() as (url, state):
        assert "0 empty" in place("--url", url).out
        assert [*place.rows()] == ["a"]
        assert "2 empty" in place("--url", url, "--log_empty_conversations").out
        assert read(place.out)[1:] == [{"conversation_id": "e"}, {"conversation_id": "s"}, {"finished": True}]
        content = place.out.read_text()
        assert place("--url", url, "--log_empty_conversations").code == 0
        assert place.out.read_text() == content
        write(place.data, *read(place.data), talk("late", "two"))
        assert "3 were there" in place("--url", url).out
    assert len(state.bodies) == 2
    assert "late" in place.rows()


def test_lines_that_share_an_id_stay_apart_in_any_order(tmp_path: Path) -> None:
    rows = [talk("x", "one"), talk("x", "two"), talk("x", "two"), talk("y", "two")]
    names = [task.id for task in read_tasks(write(tmp_path / "a.jsonl", *rows), chat=True)]
    turned = [task.id for task in read_tasks(write(tmp_path / "b.jsonl", *rows[::-1]), chat=True)]
    assert len(set(names)) == 4
    assert (names[3], set(names)) == ("y", set(turned))
    assert [task.id for task in read_tasks(tmp_path / "a.jsonl", chat=True, limit=1)] == names[:1]


def test_words_of_an_option_are_joined_up_to_the_next() -> None:
    options = (Option("system_prompt", str, None, "", words=True), Option("chat", bool, True, ""))
    given = ["go", "--system_prompt", "You", "are", "kind", "--chat", "M", "--system-prompt", "-", "be", "--limit", "3"]
    joined = ["go", "--system_prompt", "You are kind", "--chat", "M", "--system-prompt", "- be", "--limit", "3"]
    assert joined_words(given, options) == joined
    assert joined_words(["--system_prompt=a", "M"], options) == ["--system_prompt=a", "M"]


# --- failures


def ask(url: str, text: str = "one", retries: int = 3) -> Any:
    async def go() -> Any:
        async with Client(url, None, 5.0) as client:
            source = ServerAnswers(client, "canned", AnswerSampling(0.0, 1.0, 8), retries, first_wait=0.001)
            return await source.answer(as_turn(text), 1)

    return asyncio.run(go())


@pytest.mark.parametrize("fault", ["error", "busy", "garbage", "cut"])
def test_what_may_pass_is_tried_again_and_at_last_told(fault: str) -> None:
    with serving(fault=fault, faulty=2) as (url, state):
        answer = ask(url)
        assert (answer.message, answer.truncated, answer.tokens) == (assistant("answer 1 to one"), False, 4)
        assert len(state.bodies) == 3
    with serving(fault=fault) as (url, state):
        with pytest.raises(NoAnswerError, match=r"attempt 4, the last") as raised:
            ask(url)
        assert not raised.value.lasting
        assert len(state.bodies) == 4


def test_what_will_not_pass_is_not_tried_again() -> None:
    with serving() as (url, state):
        with pytest.raises(NoAnswerError, match="HTTP 400: the prompt is too long") as raised:
            ask(url, "BAD")
        assert raised.value.lasting
        assert len(state.bodies) == 1


def test_failures_go_to_a_side_file_and_are_tried_again(place: Place) -> None:
    write(place.data, talk("good", "one"), talk("down", "one", "DOWN"), talk("bad", "one", "BAD", "three"))
    with serving() as (url, state):
        done = place("--url", url, "--retries", "0", "--num_threads", "1")
        assert done.code == 1
        assert "2 conversations written, 0 of them cut by length, 0 empty, 1 without an answer" in done.out
        assert read(place.failed) == [
            {"conversation_id": "down", "turn": 2, "error": "HTTP 500: the engine broke (attempt 1, the last)"}
            | {"kept": False},
            {"conversation_id": "bad", "turn": 2, "error": "HTTP 400: the prompt is too long", "kept": True},
        ]
        assert [*place.rows()] == ["good", "bad"]
        assert answers(place.rows()["bad"]) == ["answer 1 to one"]
        assert place.rows()["bad"]["conversations"][-1]["role"] == "assistant"
        asked = len(state.bodies)
        assert place("--url", url, "--retries", "0").code == 1
        assert len(state.bodies) == asked + 2
        assert [row["conversation_id"] for row in read(place.failed)] == ["down"]


def test_a_wrong_key_ends_the_run_at_once(place: Place) -> None:
    write(place.data, *(talk(n, "one") for n in range(40)))
    with serving(fault="no_key") as (url, state):
        done = place("--url", url, "--num_threads", "2")
    assert done.code == 2
    assert "HTTP 401: the key is wrong; check --url, --api-key and --model" in done.err
    assert len(state.bodies) <= 4


def test_a_server_that_is_not_up_yet_is_waited_for(place: Place) -> None:
    """Without --model its name is asked for first, which failed at once."""
    write(place.data, talk("a", "one"))
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    open_later = Event()

    def serve_late() -> None:
        time.sleep(1.0)
        with serving(port=port):
            open_later.wait(60)

    server = Thread(target=serve_late)
    server.start()
    try:
        done = place("--url", f"http://127.0.0.1:{port}", "--retries", "5")
    finally:
        open_later.set()
        server.join()
    assert (done.code, done.err) == (0, "")
    assert [*place.rows()] == ["a"]
    refused = place("--url", f"http://127.0.0.1:{port}", "--retries", "0")
    assert "/v1/models: connection lost (ConnectError); expected a running OpenAI-compatible server" in refused.err


def test_a_server_that_is_gone_ends_the_run(place: Place) -> None:
    write(place.data, *(talk(n, "one") for n in range(HOPELESS + 9)))
    with serving() as (url, _):
        pass
    done = place("--url", url, "--model", "m", "--retries", "0", "--num_threads", "4")
    assert done.code == 2
    assert (
        f"{HOPELESS} conversations in a row got no answer, the last because: connection lost (ConnectError)" in done.err
    )
    assert HOPELESS <= len(read(place.failed)) < HOPELESS + 4


def test_bad_conversations_in_a_row_end_the_run_only_before_the_first_answer(place: Place) -> None:
    bad = [talk(n, "BAD") for n in range(2 * HOPELESS)]
    write(place.data, talk("good", "one"), *bad)
    with serving() as (url, _):
        assert place("--url", url, "--num_threads", "1").code == 1
        assert len(read(place.failed)) == 2 * HOPELESS
        place.out.unlink()
        write(place.data, *bad)
        assert "in a row" in place("--url", url).err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("embedded", "--api_key", "k"), "--api-key is for asking a server"),
        (("--url", "http://127.0.0.1:9", "--dtype", "float32"), "--dtype is for an engine"),
        (("--url", "nowhere"), "--url 'nowhere'"),
        (("--limit", "0"), "--limit 0: expected at least 1"),
        (("--num-threads", "0"), "--num-threads 0"),
        (("--num-threads", "100000"), "--num-threads 100000: expected at most"),
        (("--temperature", "nan"), "--temperature nan"),
        (("--top-p", "0"), "--top-p 0.0"),
        (("--timeout", "0"), "--timeout 0.0"),
        (("m", "--model", "n"), "MODEL is m and --model n"),
        (("nowhere/at/all",), "nowhere/at/all"),
    ],
)
def test_what_has_no_meaning_is_refused(place: Place, options: tuple[str, ...], words: str) -> None:
    write(place.data, talk("a", "one"))
    done = place(*options)
    assert done.code == 2
    assert words in done.err
    assert not place.out.exists() or not place.out.read_text()


def test_without_httpx_it_says_what_brings_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place.data, talk("a", "one"))
    monkeypatch.setitem(sys.modules, "httpx", None)
    done = place("--url", "http://127.0.0.1:9", "--model", "m")
    assert done.code == 2
    assert "needs httpx, which is not installed; run: pip install 'sametoken[server]'" in done.err


def test_files_that_are_missing_or_the_same_are_refused(place: Place, run: Any) -> None:
    assert "--data is missing" in run("synthesize", "--output", "x").err
    assert "in.jsonl is no file" in place("embedded").err
    write(place.data, talk("a", "one"))
    assert "is the data" in run("synthesize", "embedded", "--data", str(place.data), "--output", str(place.data)).err
    assert read(place.data) == [talk("a", "one")]


def test_a_bad_line_is_found_before_anything_is_asked(place: Place) -> None:
    place.data.write_text(json.dumps(talk("a", "one")) + "\n{}x\n")
    with serving() as (url, state):
        assert "in.jsonl, line 2 is not JSON" in place("--url", url).err
    assert not state.bodies


def test_other_data_under_the_same_ids_is_refused(place: Place) -> None:
    write(place.data, talk("a", "one", "LONG", "two"))
    with serving() as (url, _):
        assert place("--url", url).code == 0
        write(place.data, talk("a", "one", "LONG", "other"))
        assert place("--url", url).code == 0  # the answer was cut before the turn that changed
        write(place.data, talk("a", "three", "LONG"))
        done = place("--url", url)
    assert done.code == 2
    assert "conversation a answers to other turns" in done.err


# --- killed


def test_killed_at_any_time_it_ends_as_if_it_had_not_been(place: Place, tmp_path: Path) -> None:
    rows = [talk(n, *(f"{n} {turn}" for turn in range(1 + n % 3))) for n in range(60)]
    write(place.data, *rows)
    with serving() as (url, state):
        whole = Place(tmp_path, place._run)
        whole.out = tmp_path / "whole.jsonl"
        assert whole("--url", url).code == 0
        command = [sys.executable, "-m", "sametoken.cli", "synthesize", "--data", str(place.data)]
        command += ["--output", str(place.out), "--url", url, "--num_threads", "3"]
        for requests in (12, 36, 48):  # of 120; the last ones wait for ever
            state.hold = len(state.bodies) + requests
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            while process.poll() is None and len(state.bodies) <= state.hold:
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            with place.out.open("ab") as stream:  # what a machine that stops may leave
                stream.write(b'{"conversation_id": "59", "conversa')
            assert place.out.read_bytes().count(b"\n") > 2
        state.hold = None
        assert place("--url", url, "--num_threads", "3").code == 0
    assert place.rows() == whole.rows()
    assert len(place.rows()) == 60
    assert not place.failed.exists()


# --- the engine in this process


@pytest.fixture(scope="module")
def talker(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target with every second token an end of turn, so that conversations go on to further turns."""
    made = tmp_path_factory.mktemp("talker")
    for file in Path(tiny_pair.target).iterdir():
        if file.name != "generation_config.json":
            (made / file.name).symlink_to(file)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(2, 128, 2)]}))
    return str(made)


TEXTS = ("hi", "what is it?", "a longer one, really", "no")
TALKS = [talk(f"t{n}", *TEXTS[: 1 + n % 3]) for n in range(6)]


@pytest.mark.parametrize("options", [("--num_threads", "1"), ("--method", "ngram"), ("--draft", "DRAFT")])
def test_the_engine_says_what_chat_says(place: Place, pair: Pair, talker: str, options: tuple[str, ...]) -> None:
    write(place.data, *TALKS)
    given = [pair.draft if option == "DRAFT" else option for option in options]
    assert place(talker, "--temperature", "0", "--max_tokens", "9", "--threads", "1", *given).code == 0
    assert sum(len(answers(row)) for row in place.rows().values()) > len(TALKS)
    llm = LLM(talker)
    for entry in TALKS:
        history: list[Row] = []
        for turn in entry["messages"][::2]:
            (done,) = llm.chat([*history, turn], SamplingParams(temperature=0.0, max_tokens=9))
            history += [turn, assistant(done.text)]
            if done.finish_reason == "length":
                break
        assert place.rows()[entry["id"]]["conversations"] == history


def test_drawn_answers_depend_on_id_and_turn_alone(place: Place, talker: str) -> None:
    talks = [talk(f"t{n}", *TEXTS) for n in range(5)]
    found = []
    for rows, more in ((talks, ("--num_threads", "1")), (talks[::-1], ("--num_threads", "5", "--method", "suffix"))):
        write(place.data, *rows)
        options = ("--temperature", "0.9", "--max_tokens", "5", "--threads", "1", *more)
        assert place(talker, *options, "--limit", "2").code == 0  # then taken up
        assert place(talker, *options).code == 0
        found.append(place.rows())
        place.out.unlink()
    assert found[0] == found[1]
    assert len({answers(row)[0] for row in found[0].values()}) > 1
    assert max(len(answers(row)) for row in found[0].values()) > 1


def test_the_engine_completes_plain_prompts(place: Place, pair: Pair) -> None:
    write(place.data, {"id": "p", "prompt": "Once"})
    assert place(pair.target, "--no-chat", "--temperature", "0", "--max_tokens", "7", "--threads", "1").code == 0
    (done,) = LLM(pair.target).generate("Once", SamplingParams(temperature=0.0, max_tokens=7))
    assert place.rows()["p"]["text"] == "Once" + done.text


def test_a_conversation_that_outgrows_the_context_keeps_its_answered_turns(place: Place, talker: str) -> None:
    write(place.data, talk("a", "what is it?", "x" * 60), talk("b", "x" * 200))
    done = place(talker, "--max_tokens", "60", "--threads", "1", "--max_seq_len", "80")
    assert done.code == 1
    failures = {row["conversation_id"]: row for row in read(place.failed)}
    assert "tokens, the context holds 80" in failures["b"]["error"]
    assert (failures["a"]["turn"], failures["a"]["kept"], failures["b"]["kept"]) == (2, True, False)
    assert [turn["role"] for turn in place.rows()["a"]["conversations"]] == ["user", "assistant"]
    assert len(place.rows()) == 1


def test_no_chat_template_is_said_at_once(place: Place, pair: Pair, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in Path(pair.target).iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    write(place.data, talk("a", "hi"))
    assert "has no chat template; put chat_template.jinja beside it, or give --no-chat" in place(str(bare)).err
