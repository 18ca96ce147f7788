"""Users' turns drawn from the target itself, which goes on where its chat template would put a user's text.

The method is known as Magpie (Xu et al., arXiv 2406.08464): no data is needed, and what is asked is what the model
expects to be asked. It takes an engine: a server's chat API has no place for a turn that is begun and not finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sametoken.checkpoint.chat import unused_signs
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.data.answers import AnswerSampling, NoAnswerError
from sametoken.data.conversations import read_records
from sametoken.data.synthesize import Message, Questions, Task, derived_seed
from sametoken.errors import RequestError
from sametoken.options.sampling import SamplingParams

if TYPE_CHECKING:
    from sametoken.engine.async_llm import AsyncLLM

MOST_TURNS = 4  # of a conversation whose number of turns is drawn
ATTEMPTS = 8  # at a first turn that is neither empty nor cut
EXCLUDING = 64  # attempts where some turns are excluded: a narrow model says them often


def self_tasks(count: int, system: str = "") -> Iterator[Task]:
    """Conversations of which nothing is said yet but the system turn, named by their number."""
    for number in range(count):
        yield Task(f"self-{number:06d}", lead(system), {})


def lead(system: str) -> list[Message]:
    """Messages before the first user's turn."""
    return [{"role": "system", "content": system}] if system else []


class Opening(NamedTuple):
    """A user's turn under a chat template, from outside.

    Attributes:
        prompt: what stands before its text. Spaces at the end are left off: tokenizers put them into the next word.
        stop: what stands after it as plain text, its first line; "" where a special token comes first.
    """

    prompt: str
    stop: str


def open_turn(tokenizer: Tokenizer, history: Sequence[Message]) -> Opening:
    """Find the place of the user's next text in a rendered conversation.

    Args:
        history: messages before it; the last one is not the user's.

    Raises:
        RequestError: there is no template, it refuses the conversation, or it does not show where a user's text stands.
    """
    sign = next(unused_signs(str(history)))
    text = tokenizer.apply_chat_template([*history, {"role": "user", "content": sign}])
    if text.count(sign) != 1:
        raise RequestError(
            f"the chat template shows a user's text {text.count(sign)} times, expected once; the model cannot write "
            "users' turns: give data instead"
        )
    before, _, after = text.partition(sign)
    prompt = before.rstrip(" ")
    if not prompt:
        raise RequestError(
            "the chat template puts nothing before a user's text, so nothing tells the model that a user speaks; "
            "give data instead"
        )
    ids, spans = tokenizer.encode_spans(after)
    marks = [start for token, (start, _) in zip(ids, spans, strict=True) if token in tokenizer.special_ids]
    if not marks and not after.strip():
        raise RequestError("the chat template puts nothing after a user's text, so it has no end; give data instead")
    line = re.match(r"\s*.*", after[: min(marks, default=len(after))])
    assert line is not None
    return Opening(prompt, line.group().rstrip())


def plain_text(text: str) -> str:
    """Words of a turn without case, punctuation and spacing, by which repeated turns are found."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()


def user_turns(file: str | Path) -> frozenset[str]:
    """`plain_text` of every user's turn in a file of conversations.

    Raises:
        DataError: the file cannot be read, or a line is no conversation.
    """
    records = read_records(file)
    return frozenset(
        plain_text(message["content"]) for each in records for message in each.messages if message["role"] == "user"
    )


class SelfPrompts:
    """Draws users' turns.

    Args:
        engine: which answers too.
        sampling: of users' turns.
        seed: from which those of the turns are derived, with the conversation's id and the turn.
        turns: users' turns of every conversation; None draws 1 to `MOST_TURNS` for each.
        excluded: from `user_turns`: what no conversation begins with.
    """

    def __init__(
        self, engine: AsyncLLM, sampling: AnswerSampling, seed: int, turns: int | None = None,
        excluded: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._engine, self._sampling, self._seed, self._turns = engine, sampling, seed, turns
        self._excluded = excluded
        tokenizer, vocab_size = engine.llm.tokenizer, engine.llm.config.vocab_size
        # No user's text has a special token, whichever the template ends a turn with.
        self._end_ids = tuple(sorted(token for token in tokenizer.special_ids if token < vocab_size))

    def questions(self, task: Task) -> Questions:
        """The user's turns of a conversation, each drawn after the answers before it.

        An empty or cut one ends the conversation; where it, or one that is excluded, would be the first, another one is
        drawn.
        """
        turns = self._turns or 1 + derived_seed(self._seed, task.id, "turns") % MOST_TURNS

        async def draw(history: Sequence[Message], turn: int) -> list[Message]:
            if turn > turns:
                return []
            if turn > 1:
                return _user(await self._say(history, derived_seed(self._seed, task.id, turn, "user", 1)))
            assert not isinstance(task.source, str)
            attempts = EXCLUDING if self._excluded else ATTEMPTS
            for attempt in range(1, attempts + 1):
                text = await self._say(task.source, derived_seed(self._seed, task.id, turn, "user", attempt))
                if text and plain_text(text) not in self._excluded:
                    return [*task.source, *_user(text)]
            excluded = ", or are in the file of --exclude" if self._excluded else ""
            raise NoAnswerError(
                f"{attempts} attempts at a user's turn were empty or longer than {self._sampling.max_tokens} tokens"
                f"{excluded}; raise --prompt-max-tokens or change --prompt-temperature",
                lasting=True,
            )

        return draw

    async def _say(self, history: Sequence[Message], seed: int) -> str:
        """Generate the user's next text, "" if it is cut by length."""
        llm = self._engine.llm
        try:
            opening = open_turn(llm.tokenizer, history)
            params = SamplingParams(
                **self._sampling._asdict(), seed=seed, stop=opening.stop or None, stop_token_ids=self._end_ids
            )
            ids = llm.tokenizer.encode(opening.prompt, add_special_tokens=False)
            (done,) = await self._engine.generate([ids], params)
        except RequestError as error:
            raise NoAnswerError(str(error), lasting=True) from error
        return "" if done.finish_reason == "length" else done.text.strip()


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}] if text else []
