"""How a draft fares on held-out conversations: the engine serves their prompts and counts, as it does for users.

Acceptance length is tokens emitted per forward of the target, bonus included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.places import target_directory
from sametoken.checkpoint.tokenizer import load_tokenizer
from sametoken.data.conversations import read_records
from sametoken.engine.completion import Completion
from sametoken.engine.llm import LLM
from sametoken.errors import DataError
from sametoken.model.config import ModelConfig
from sametoken.speculation.params import SamplingParams

CATEGORY = "category"  # key of a conversation by which results are told apart


class Question(NamedTuple):
    """A prompt in token ids, and what kind it is ("" if the data do not say)."""

    ids: list[int]
    category: str


@dataclass(frozen=True)
class Asked:
    """How drafts are judged.

    Attributes:
        max_draft_len: longest draft, always drafted in full.
        tokens: of each answer, at most.
        temperature, seed: of the draws; temperature 0 is greedy.
        engine: further keys of `EngineConfig`.
    """

    max_draft_len: int = 5
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    engine: dict[str, Any] | None = None


@dataclass(frozen=True)
class Judgement:
    """What drafts did for some prompts.

    Attributes:
        prompts, tokens, forwards: prompts, tokens emitted, and forwards of the target that they took.
        drafts, accepted: forwards with a draft, and guesses accepted in them.
        by_position: for each place of a draft, the share of its guesses that were accepted after all before it were.
        by_category: acceptance length of each kind of prompt.
    """

    prompts: int
    tokens: int
    forwards: int
    drafts: int
    accepted: int
    by_position: list[float]
    by_category: dict[str, float]

    @property
    def acceptance_length(self) -> float:
        return self.tokens / max(self.forwards, 1)

    @property
    def tokens_per_draft(self) -> float:
        """1 + accepted / drafts, vLLM's acceptance length: the forwards that read the prompts are left out."""
        return 1 + self.accepted / max(self.drafts, 1)


def read_questions(file: str | Path, llm: LLM, count: int, tokens: int) -> list[Question]:
    """The prompts of the first conversations of a file: all but each one's last answer.

    Conversations that are too long for the model are left out.

    Raises:
        DataError: the file is unreadable, or none of its conversations has a prompt that fits.
    """
    return _questions(file, llm.render_chat, llm.max_seq_len, count, tokens)


def _questions(
    file: str | Path, render: Callable[[list[dict[str, Any]]], list[int]], context: int, count: int, tokens: int
) -> list[Question]:
    found: list[Question] = []
    for record in read_records(file):
        messages = record.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            continue
        ids = render(messages)
        if len(ids) + tokens <= context:
            found.append(Question(ids, str(record.rest.get(CATEGORY, ""))))
        if len(found) == count:
            break
    if not found:
        raise DataError(
            f"{file}: no conversation has a prompt that fits into {context} positions with {tokens} tokens of "
            "answer; use shorter ones"
        )
    return found


def judge(llm: LLM, questions: Sequence[Question], asked: Asked) -> Judgement:
    """Answers the prompts and counts."""
    params = SamplingParams(max_tokens=asked.tokens, temperature=asked.temperature, seed=asked.seed)
    completions = llm.generate([question.ids for question in questions], params)
    groups: dict[str, list[Completion]] = defaultdict(list)
    for question, completion in zip(questions, completions, strict=True):
        groups[question.category].append(completion)
    tokens, forwards = _counted(completions)
    stats = [completion.speculation for completion in completions]
    drafts = sum(sum(each.drafted_lengths[1:]) for each in stats)
    return Judgement(
        len(completions), tokens, forwards, drafts, sum(each.accepted for each in stats), _by_position(completions),
        {name: _length(group) for name, group in sorted(groups.items()) if name},
    )  # fmt: skip


def _counted(completions: Iterable[Completion]) -> tuple[int, int]:
    stats = [completion.speculation for completion in completions]
    return sum(each.emitted for each in stats), sum(each.target_forwards for each in stats)


def _length(completions: Iterable[Completion]) -> float:
    tokens, forwards = _counted(completions)
    return tokens / max(forwards, 1)


def _by_position(completions: Sequence[Completion]) -> list[float]:
    stats = [completion.speculation for completion in completions]
    tried = [sum(each) for each in _columns([each.tried for each in stats])]
    reached = _columns([each.accepted_lengths for each in stats])
    # A draft of which a guesses were accepted had its first a guesses accepted.
    accepted = [sum(sum(column) for column in reached[place + 1 :]) for place in range(len(tried))]
    return [right / max(all_, 1) for right, all_ in zip(accepted, tried, strict=True)]


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max((len(row) for row in rows), default=0)
    return [[row[i] if i < len(row) else 0 for row in rows] for i in range(width)]


def open_llm(target: str, draft: str, asked: Asked) -> LLM:
    """The engine that judges a draft: every draft has its full length."""
    speculative = {"max_draft_len": asked.max_draft_len, "adaptive": False}
    return LLM(target, draft, speculative, **(asked.engine or {}))


def judge_of(target: str, file: str, count: int, asked: Asked) -> Callable[[Path], float]:
    """A judge of heads in directories, by the acceptance length on a file's prompts.

    Raises:
        DataError: the file is unreadable, or none of its prompts fits; now rather than after hours of training.
    """
    directory = target_directory(target)
    tokenizer = load_tokenizer(directory)

    def render(messages: list[dict[str, Any]]) -> list[int]:
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)

    _questions(file, render, ModelConfig.from_hf(read_config(directory)).max_position, count, asked.tokens)

    def measure(head: Path) -> float:
        llm = open_llm(target, str(head), asked)
        return judge(llm, read_questions(file, llm, count, asked.tokens), asked).acceptance_length

    return measure
