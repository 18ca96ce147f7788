"""Synthesis of conversations with assistant turns of the target: rewritten ones of a file, or new ones.

Results are independent of order, batch and restarts: they depend on a conversation's own turns and id alone.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.client.client import all_together
from sametoken.data.answers import Answerer, NoAnswerError
from sametoken.data.journal import Lines
from sametoken.errors import DataError, SametokenError
from sametoken.prompts.conversations import ID_KEYS, DataRow, parse_record, read_rows, row_id, writable_text
from sametoken.prompts.sources import Conversation

FINISHED = {"finished": True}
PROMPT_KEYS = ("prompt", "text")
HOPELESS = 16  # successive conversations without an answer after which a run is aborted
Message = dict[str, Any]
Questions = Callable[[Sequence[Message], int], Awaitable[list[Message]]]  # history and turn -> next user turns, or []


class Task(NamedTuple):
    """Conversation to answer, or text to complete.

    Attributes:
        id: unique id in the file.
        source: messages, old answers included, or a text.
        rest: keys of the line that are copied unchanged.
    """

    id: str
    source: list[Message] | str
    rest: dict[str, Any]

    @property
    def said(self) -> list[str]:
        """Texts of the turns that are not the assistant's, to which answers are generated."""
        return _said(self.source)

    @property
    def empty(self) -> bool:
        """True if there is no turn to answer."""
        return not self.source or not (
            isinstance(self.source, str) or any(message["role"] in ("user", "tool") for message in self.source)
        )


def read_tasks(file: Path, chat: bool, system: str = "", limit: int | None = None) -> Iterator[Task]:
    """Yield the tasks of a file, in order; a digest of the content is appended to a repeated id.

    Args:
        chat: read conversations; otherwise texts, from `prompt`, `text` or a conversation's first user turn.
        system: the system turn of conversations that have none.
        limit: most lines to read.

    Raises:
        DataError: the file cannot be read, or a line is no task; the message has file and line.
    """
    counts = Counter(row_id(row) for row in read_rows(file))
    copies: Counter[str] = Counter()
    for row in islice(read_rows(file), limit):
        name = row_id(row)
        source, rest = _conversation(row, system) if chat else _text(row)
        if counts[name] > 1:
            name += f"-{hashlib.sha256(json.dumps(source).encode()).hexdigest()[:12]}"
            copies[name] += 1
            name += f"-{copies[name]}" if copies[name] > 1 else ""
        yield Task(name, source, rest)


def _conversation(row: DataRow, system: str) -> tuple[list[Message], dict[str, Any]]:
    record = parse_record(row)
    if record is None:
        return [], {}
    lead = system and record.messages[0]["role"] != "system"
    return [{"role": "system", "content": system}, *record.messages] if lead else record.messages, record.rest


def _text(row: DataRow) -> tuple[str, dict[str, Any]]:
    """Text to complete, which for a conversation is its first user turn."""
    key = next((key for key in PROMPT_KEYS if row.entry.get(key) is not None), None)
    if key is None:
        messages, rest = _conversation(row, "")
        return next((message["content"] for message in messages if message["role"] == "user"), ""), rest
    rest = {name: value for name, value in row.entry.items() if name not in (*ID_KEYS, *PROMPT_KEYS, "truncated")}
    return writable_text(row.entry[key], f"{row.where}: {key}"), rest


def _said(source: object) -> list[str]:
    if isinstance(source, str):
        return [source]
    return [message["content"] for message in source if not _is_answer(message)]  # type: ignore[attr-defined]


def _is_answer(message: Mapping[str, Any]) -> bool:
    """True if a turn is to be generated again. Tool calls are kept, since the tools' replies belong to them."""
    return message["role"] == "assistant" and not message.get("tool_calls")


class Finished:
    """Conversations in an existing output, with the prompts of each.

    Args:
        file: output of `Synthesis`, of whole lines.
        chat: true for conversations, false for texts.

    Raises:
        DataError: a line was not written by `Synthesis`.
    """

    def __init__(self, file: Path, chat: bool) -> None:
        self._file = file
        self._known: dict[str, tuple[int, str]] = {}
        for row in read_rows(file):
            turns = _said(_conversation(row, "")[0] if chat else row.entry.get("prompt", []))
            self._known[row_id(row)] = len(turns), _digest(turns)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def holds(self, task: Task) -> bool:
        """True if the task is done.

        Raises:
            DataError: the output has other turns under the id of the task.
        """
        if task.id not in self:
            return False
        count, digest = self._known[task.id]
        if _digest(task.said[:count]) != digest:
            raise DataError(
                f"{self._file}: conversation {task.id} answers to other turns than the data now has; "
                "go on with the data that it was begun with, or choose another output"
            )
        return True


def _digest(turns: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16]


@dataclass
class Summary:
    """Number of conversations so far, by result.

    Attributes:
        written: lines written.
        truncated: written lines whose answer was cut by length.
        empty: conversations without a turn to answer.
        failed: conversations without a line, which are in the file of failures.
        tokens: tokens of the answers.
    """

    written: int = 0
    truncated: int = 0
    empty: int = 0
    failed: int = 0
    tokens: int = 0


class Answered(NamedTuple):
    """Result of a task: its line or None, and the reason why it is incomplete or None."""

    entry: dict[str, Any] | None
    tokens: int = 0
    failure: NoAnswerError | None = None
    turn: int = 0


def given_questions(task: Task) -> Questions:
    """Yield the task's own turns up to each answer to generate."""
    assert not isinstance(task.source, str)
    groups = _before_answers(task.source)

    async def following(history: Sequence[Message], turn: int) -> list[Message]:
        return next(groups, [])

    return following


def _before_answers(source: list[Message]) -> Iterator[list[Message]]:
    said: list[Message] = []
    waiting = False
    for message, following in pairwise([*source, None]):
        assert message is not None
        if not _is_answer(message):
            said.append(message)
            waiting = message["role"] in ("user", "tool") or (waiting and message["role"] == "system")
        if waiting and (following is None or _is_answer(following)):
            yield said
            said, waiting = [], False


async def converse(task: Task, questions: Questions, answers: Answerer, seed: int) -> Answered:
    """Answer the turns of a conversation in order, each after the new answers before it.

    An answer cut by length ends the conversation; turns at the end without an answer are removed.
    """
    history: list[Message] = []
    whole = turn = tokens = 0
    truncated, failure = False, None
    while not truncated:
        turn += 1
        try:
            said = await questions(history, turn)
            if not said:
                break
            history += said
            answer = await answers.answer(Conversation(history), derived_seed(seed, task.id, turn))
        except NoAnswerError as error:
            failure = error
            break
        history.append(answer.message)
        whole, tokens, truncated = len(history), tokens + answer.tokens, answer.truncated
    if not whole or (failure is not None and not failure.lasting):
        return Answered(None, tokens, failure, turn)
    cut = {"truncated": True} if truncated else {}
    entry = {"conversation_id": task.id, "conversations": history[:whole], **cut, **task.rest}
    return Answered(entry, tokens, failure, turn)


async def complete(task: Task, answers: Answerer, seed: int) -> Answered:
    """Complete a text; the line has the prompt, and the concatenation of prompt and completion."""
    assert isinstance(task.source, str)
    if not task.source:
        return Answered(None)
    try:
        answer = await answers.answer(task.source, derived_seed(seed, task.id, 1))
    except NoAnswerError as error:
        return Answered(None, failure=error, turn=1)
    cut = {"truncated": True} if answer.truncated else {}
    text = task.source + answer.message["content"]
    return Answered(
        {"conversation_id": task.id, "prompt": task.source, "text": text, **cut, **task.rest}, answer.tokens
    )


def derived_seed(*parts: int | str) -> int:
    """Seed of 63 bits from parts; for an answer, from the run's seed, the conversation's id and the turn."""
    return int.from_bytes(hashlib.sha256("\n".join(map(str, parts)).encode()).digest()[:8]) >> 1


Answering = Callable[[Task], Awaitable[Answered]]


def answering(answers: Answerer, seed: int, questions: Callable[[Task], Questions] = given_questions) -> Answering:
    """Make the function that processes a task.

    Args:
        seed: seed from which the seeds of answers are derived.
        questions: generator of the turns that are not the assistant's.
    """

    async def do(task: Task) -> Answered:
        if isinstance(task.source, str):
            return await complete(task, answers, seed)
        return await converse(task, questions(task), answers, seed)

    return do


class Synthesis:
    """Concurrent processing of tasks; each result is written at once.

    Args:
        do: function that processes a task, see `answering`.
        lines: output for the conversations.
        failures: function that opens the file of failures at the first one.
        log_empty: write ids of conversations without a turn to answer too, and a last line when the run is complete.
        progress: called after every task.
    """

    def __init__(
        self,
        do: Answering,
        lines: Lines,
        failures: Callable[[], Lines],
        *,
        log_empty: bool = False,
        progress: Callable[[Summary], None] = lambda summary: None,
    ) -> None:
        self.summary = Summary()
        self._do, self._lines, self._failures, self._log_empty = do, lines, failures, log_empty
        self._progress, self._in_a_row = progress, 0

    async def run(self, tasks: Iterable[Task], concurrency: int) -> Summary:
        """Answer all tasks.

        Raises:
            SametokenError: the run cannot continue: full disk, server that refuses all requests, or invalid line.
        """
        left = iter(tasks)

        async def work() -> None:
            for task in left:
                self._note(task, await self._do(task))
                self._progress(self.summary)

        await all_together(work() for _ in range(concurrency))
        if self._log_empty and not self.summary.failed:
            self._lines.append(FINISHED)
        return self.summary

    def _note(self, task: Task, outcome: Answered) -> None:
        summary = self.summary
        summary.tokens += outcome.tokens
        if outcome.entry is not None:
            self._lines.append(outcome.entry)
            summary.written += 1
            summary.truncated += bool(outcome.entry.get("truncated"))
            self._in_a_row = 0
        elif outcome.failure is None:
            summary.empty += 1
            if self._log_empty:
                self._lines.append({"conversation_id": task.id})
        if outcome.failure is not None:
            self._note_failure(task, outcome, outcome.failure)

    def _note_failure(self, task: Task, outcome: Answered, failure: NoAnswerError) -> None:
        kept = outcome.entry is not None
        self._failures().append({"conversation_id": task.id, "turn": outcome.turn, "error": str(failure), "kept": kept})
        if kept:
            return
        self.summary.failed += 1
        # Prompts that are too long may be adjacent; before the first answer they indicate a wrong setting.
        if not failure.lasting or not self.summary.written:
            self._in_a_row += 1
        if self._in_a_row >= HOPELESS:
            raise SametokenError(
                f"{HOPELESS} conversations in a row got no answer, the last because: {failure}; "
                "what is written is whole: correct it and run the same command again"
            )
