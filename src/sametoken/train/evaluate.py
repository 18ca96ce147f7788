"""Evaluation of drafts on held-out conversations, by the engine as it serves users.

The acceptance length is the number of tokens per forward of the target, bonus token included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.places import target_directory
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.engine.llm import LLM
from sametoken.engine.stats import SpeculationStats
from sametoken.errors import DataError
from sametoken.model.config import ModelConfig
from sametoken.options.sampling import SamplingParams
from sametoken.prompts.conversations import DataRow, read_rows
from sametoken.prompts.files import parse_item
from sametoken.prompts.sources import Conversation, Source
from sametoken.prompts.suites import Suite

CATEGORY = "category"  # key of a conversation by which results are grouped


class Question(NamedTuple):
    """Prompt with the later turns of the user.

    Attributes:
        ids: token ids of the prompt.
        category: category of the prompt, "" if the data have none.
        messages: prompt as a conversation, empty for a text.
        later: user turns after the first answer, the second answer and so on.
    """

    ids: list[int]
    category: str
    messages: tuple[dict[str, Any], ...] = ()
    later: tuple[str, ...] = ()

    def next(self, answer: str, tokenizer: Tokenizer) -> Question:
        """Question extended by its answer and the user's next turn."""
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": self.later[0]})
        messages = (*self.messages, *said)
        return Question(_ids(Conversation(messages), tokenizer), self.category, messages, self.later[1:])


@dataclass(frozen=True)
class Asked:
    """Settings of an evaluation.

    Attributes:
        max_draft_len: draft length, which every draft has.
        tokens: most tokens of each answer.
        temperature: sampling temperature; 0 for greedy.
        seed: sampling seed.
        engine: further fields of `EngineConfig`.
    """

    max_draft_len: int = 5
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    engine: dict[str, Any] | None = None


@dataclass(frozen=True)
class Figures:
    """Counts of some prompts, and acceptance by draft position.

    Attributes:
        prompts: number of prompts; each turn of a conversation is one.
        tokens: number of emitted tokens.
        forwards: number of forwards of the target.
        drafts: number of forwards with a draft.
        accepted: number of accepted draft tokens.
        by_position: acceptance rate of each draft position, given that all earlier positions were accepted.
        joint: share of the drafts in which a position and all earlier ones were accepted, by position.
    """

    prompts: int
    tokens: int
    forwards: int
    drafts: int
    accepted: int
    by_position: list[float]
    joint: list[float]

    @classmethod
    def of(cls, stats: Sequence[SpeculationStats]) -> Figures:
        """Figures of the statistics of several prompts."""
        total = SpeculationStats.total(stats)
        # If n tokens of a draft were accepted, these were its first n.
        accepted = [sum(total.accepted_lengths[place + 1 :]) for place in range(len(total.tried))]
        return cls(
            len(stats), total.emitted, total.target_forwards, total.drafts, total.accepted,
            [right / max(tried, 1) for right, tried in zip(accepted, total.tried, strict=True)],
            [right / max(total.drafts, 1) for right in accepted],
        )  # fmt: skip

    @property
    def acceptance_length(self) -> float:
        return self.tokens / max(self.forwards, 1)

    @property
    def tokens_per_draft(self) -> float:
        """vLLM's acceptance length 1 + accepted / drafts, without the forwards that read prompts."""
        return 1 + self.accepted / max(self.drafts, 1)

    def to_json(self) -> dict[str, Any]:
        """JSON object of all figures."""
        lengths = {"acceptance_length": self.acceptance_length, "tokens_per_draft": self.tokens_per_draft}
        return lengths | asdict(self)


@dataclass(frozen=True)
class Evaluation(Figures):
    """Results of an evaluation.

    Attributes:
        left_out: number of later turns that did not fit into the context.
        categories: figures of each category.
    """

    left_out: int
    categories: dict[str, Figures]

    @property
    def by_category(self) -> dict[str, float]:
        """Acceptance length of each category."""
        return {name: figures.acceptance_length for name, figures in self.categories.items()}

    def to_json(self) -> dict[str, Any]:
        categories = {name: figures.to_json() for name, figures in self.categories.items()}
        return super().to_json() | {"by_category": self.by_category, "categories": categories}


def read_questions(file: str | Path, llm: LLM, count: int, tokens: int) -> list[Question]:
    """Read the prompts of the first conversations of a file: each without its last answer.

    Files of published benchmarks are supported; the turns of MT-Bench and Spec-Bench follow the model's own answers.
    Conversations whose first prompt is too long for the model are left out.

    Raises:
        DataError: the file is unreadable, or none of its conversations has a prompt that fits.
        RequestError: a line has no known format.
    """
    return _questions(read_rows(file), file, (llm.tokenizer, llm.max_seq_len), count, tokens)


def read_suite(suite: Suite, file: str, llm: LLM, count: int, tokens: int) -> list[Question]:
    """Read the prompts of a benchmark's file: so many, evenly from its categories, without those that are too long.

    Raises:
        DataError: the file is unreadable or not the benchmark's, or none of its prompts fits.
    """
    if user_path(file).suffix == ".parquet":
        raise DataError(f"{file}: Parquet, expected JSON lines; write them with pandas: read_parquet and to_json")
    return _questions(suite.rows(read_rows(file), count, file), file, (llm.tokenizer, llm.max_seq_len), count, tokens)


def _questions(
    rows: Iterable[DataRow], file: str | Path, fits: tuple[Tokenizer, int], count: int, tokens: int
) -> list[Question]:
    """Prompts of the first rows that fit into a model: its tokenizer, and its context in tokens."""
    found: list[Question] = []
    tokenizer, context = fits
    for row in rows:
        question = _question(row, tokenizer)
        if question is not None and len(question.ids) + tokens <= context:
            found.append(question)
        if len(found) == count:
            break
    if not found:
        raise DataError(
            f"{file}: no conversation has a prompt that fits into {context} positions with {tokens} tokens of "
            "answer; use shorter ones"
        )
    return found


def _question(row: DataRow, tokenizer: Tokenizer) -> Question | None:
    """Prompt of a row, None if it has none."""
    _, item = parse_item(row)
    if item is None:
        return None
    source = item.source
    shown = tuple(source.messages) if isinstance(source, Conversation) else ()
    return Question(_ids(source, tokenizer), str(row.entry.get(CATEGORY) or ""), shown, item.later)


def _ids(source: Source, tokenizer: Tokenizer) -> list[int]:
    if isinstance(source, str):
        return tokenizer.encode(source)
    return tokenizer.encode(tokenizer.apply_chat_template(source.messages), add_special_tokens=False)


def evaluate(llm: LLM, questions: Sequence[Question], asked: Asked, *, progress: bool = False) -> Evaluation:
    """Generate answers to the prompts and count; later turns follow the model's own answers of at most `asked.tokens`.

    Args:
        progress: show a progress bar on standard error if it is a terminal.
    """
    params = SamplingParams(max_tokens=asked.tokens, temperature=asked.temperature, seed=asked.seed)
    every: list[SpeculationStats] = []
    groups: dict[str, list[SpeculationStats]] = defaultdict(list)
    left_out, waiting = 0, list(questions)
    while waiting:
        completions = llm.generate([question.ids for question in waiting], params, progress=progress)
        answered = list(zip(waiting, completions, strict=True))
        for question, completion in answered:
            every.append(completion.speculation)
            groups[question.category].append(completion.speculation)
        following = [question.next(done.text, llm.tokenizer) for question, done in answered if question.later]
        waiting = [each for each in following if len(each.ids) + asked.tokens <= llm.max_seq_len]
        left_out += sum(1 + len(each.later) for each in following) - sum(1 + len(each.later) for each in waiting)
    figures = Figures.of(every)
    total = {each.name: getattr(figures, each.name) for each in fields(Figures)}
    categories = {name: Figures.of(group) for name, group in sorted(groups.items()) if name}
    return Evaluation(**total, left_out=left_out, categories=categories)


def definition(asked: Asked) -> str:
    """Definition of the figures of an evaluation, in words."""
    drawn = "greedy" if asked.temperature == 0 else f"temperature {asked.temperature:g}, seed {asked.seed}"
    return (
        "acceptance length = tokens of the answers / forwards of the target: the bonus token counts, and so does the "
        "forward that reads the prompt (1.0 is plain decoding; sums over all prompts, not means of prompts). "
        "1 + accepted / drafts leaves out forwards without a draft, as vLLM does. Joint at place k: share of the "
        "drafts whose guesses 1 to k were all accepted; conditional: share of the guesses at place k that were "
        f"accepted where those before were. Drafts of {asked.max_draft_len} tokens at every forward, {drawn}, answers "
        f"of at most {asked.tokens} tokens. Other evaluators differ by up to 1.0 for the same head."
    )


def open_llm(target: str, draft: str, asked: Asked) -> LLM:
    """Open the engine for an evaluation, with a fixed draft length."""
    speculative = {"max_draft_len": asked.max_draft_len, "adaptive": False}
    return LLM(target, draft, speculative, **(asked.engine or {}))


def evaluator_of(target: str, file: str, count: int, asked: Asked) -> Callable[[Path], float]:
    """Make a function from the directory of a head to its acceptance length on a file's prompts.

    Raises:
        DataError, RequestError: the file is unreadable, or none of its prompts fits; raised at once, before training.
    """
    directory = target_directory(target)
    tokenizer = load_tokenizer(directory)

    context = ModelConfig.from_hf(read_config(directory)).max_position
    _questions(read_rows(file), file, (tokenizer, context), count, asked.tokens)

    def measure(head: Path) -> float:
        llm = open_llm(target, str(head), asked)
        return evaluate(llm, read_questions(file, llm, count, asked.tokens), asked).acceptance_length

    return measure
