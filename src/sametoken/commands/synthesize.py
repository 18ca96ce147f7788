"""`sametoken synthesize`: training data with answers of the target, from the engine of this process or a server.

Exit code 1 if conversations got no answer; they are in OUTPUT.failed.jsonl, and the same command tries them again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken import embedded
from sametoken.checkpoint.paths import user_path
from sametoken.commands.models import open_llm
from sametoken.commands.options import Values, engine_options, refuse_given
from sametoken.commands.synthesize_options import COMMON, LIMIT, REMOTE, SELF
from sametoken.commands.terminal import open_progress
from sametoken.errors import ConfigError
from sametoken.interrupt import Stop, cancel_at_signals

if TYPE_CHECKING:
    from sametoken.client.client import Client
    from sametoken.data.answers import AnswerSampling
    from sametoken.data.journal import Lines
    from sametoken.data.synthesize import Answering, Finished, Questions, Summary, Task
    from sametoken.engine.async_llm import AsyncLLM

SERVER_THREADS = 256
ENGINE = engine_options()
TEXT_KEYS = ("dtype", "quantization", "max_seq_len", "revision")  # engine options that change outputs

OPTIONS = (*COMMON, *SELF, *REMOTE, *ENGINE)
EXAMPLES = {
    "let the model answer the prompts of a file":
        "sametoken synthesize MODEL --data prompts.jsonl --output answers.jsonl",
    "ask a server": "sametoken synthesize --url http://localhost:8000 --data prompts.jsonl --output answers.jsonl",
    "without any data": "sametoken synthesize MODEL --self-prompts 1000 --output answers.jsonl",
}  # fmt: skip


def command(model: str | None, values: Values) -> int:
    """Let the target answer the conversations of a file, as training data for a head.

    The target writes every assistant turn anew, after its own earlier answers. With --self-prompts no file is needed:
    the target writes the users' turns too. If the command is stopped at any time, the same command continues.
    """
    from sametoken.data.journal import take_up
    from sametoken.data.synthesize import Finished

    data, output = _check(values)
    name = _name(model, values)
    system = values["system_prompt"] or ""
    settings = {
        "by": "engine" if values["url"] is None else "server",
        "model": name,
        **({key: values[key] for key in TEXT_KEYS} if values["url"] is None else {}),
        **{key: values[key] for key in ("temperature", "top_p", "max_tokens", "seed", "chat")},
        "system_prompt": system,
        **({} if data is not None else _self_settings(values)),
    }
    with closing(take_up(output, settings)) as lines:
        return _go_on(Assignment(name, values, data, lines, Finished(output, values["chat"])))


def _self_settings(values: Values) -> dict[str, Any]:
    """Settings that determine the users' turns that the model writes."""
    from sametoken.files import stamp

    chosen = {option.name: values[option.name] for option in SELF if option.name != "exclude"}
    # Left out if it is not set, so that outputs of releases without this option can be continued.
    excluded = {"exclude": stamp(user_path(values["exclude"])).sha256} if values["exclude"] is not None else {}
    return {"data": "self", **chosen, **excluded}


def _check(values: Values) -> tuple[Path | None, Path]:
    """Check the options before anything is loaded; return the files of data (None with --self-prompts) and output."""
    if values["output"] is None:
        raise ConfigError("--output is missing; expected --data FILE --output FILE")
    if values["url"] is None:
        refuse_given(REMOTE, values, "asking a server: give --url too")
    else:
        refuse_given(ENGINE, values, "an engine in this process: leave out --url")
    output = user_path(values["output"])
    return _check_data(values, output), output


def _check_data(values: Values, output: Path) -> Path | None:
    if values["self_prompts"] is not None:
        refuse_given((LIMIT,), values, "--data: leave out --self-prompts")
        if values["data"] is not None:
            raise ConfigError("got --data and --self-prompts; leave one of them out")
        if values["url"] is not None:
            raise ConfigError(
                "--self-prompts has no server to ask: a chat API has no place for a user's turn that is begun and not "
                "finished; leave out --url, so that the engine in this process writes them"
            )
        if not values["chat"]:
            raise ConfigError("--self-prompts makes conversations; leave out --no-chat")
        if values["exclude"] is not None:
            _check_excluded(user_path(values["exclude"]), output)
        return None
    refuse_given(SELF, values, "conversations without data: give --self-prompts too")
    if values["data"] is None:
        raise ConfigError("--data is missing; expected --data FILE, or --self-prompts COUNT to do without")
    data = user_path(values["data"])
    if data.resolve() == output.resolve():
        raise ConfigError(f"--output {output} is the data; expected another file")
    if not data.is_file():
        raise ConfigError(f"--data {data} is no file; expected conversations, .jsonl or .json")
    return data


def _check_excluded(file: Path, output: Path) -> None:
    if file.resolve() == output.resolve():
        raise ConfigError(f"--exclude {file} is the output; expected other conversations, as those to train on")
    if not file.is_file():
        raise ConfigError(f"--exclude {file} is no file; expected conversations, .jsonl or .json")


def _name(model: str | None, values: Values) -> str:
    """Name of the model on the server: MODEL or --model, or the first that the server lists."""
    if model is not None and values["model"] not in (None, model):
        raise ConfigError(f"MODEL is {model} and --model {values['model']}; leave one of them out")
    name = model or values["model"]
    if values["url"] is not None:
        return name or asyncio.run(_listed(values))
    if name is None or name == embedded.NAME:
        return embedded.NAME
    directory = user_path(name)
    return str(directory.resolve()) if directory.is_dir() else name


async def _listed(values: Values) -> str:
    async with _client(values) as client:
        return await client.first_model(values["retries"])


def _client(values: Values) -> Client:
    from sametoken.client.client import Client

    return Client(values["url"], values["api_key"] or os.environ.get("OPENAI_API_KEY"), values["timeout"])


class Assignment(NamedTuple):
    """Conversations without an answer in `lines` yet, and the model that answers them.

    The conversations are those of `data`; if `data` is None, the model writes them itself.
    """

    name: str
    values: Values
    data: Path | None
    lines: Lines
    finished: Finished

    @property
    def failed(self) -> Path:
        """File of the conversations without an answer."""
        return self.lines.path.with_name(self.lines.path.name + ".failed.jsonl")

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks that are left; empty conversations only where they are to be logged."""
        from sametoken.data.synthesize import read_tasks

        chosen = self.values
        if self.data is None:
            from sametoken.data.self_prompts import self_tasks

            tasks = self_tasks(chosen["self_prompts"], chosen["system_prompt"] or "")
            yield from (task for task in tasks if task.id not in self.finished)
            return
        for task in read_tasks(self.data, chosen["chat"], chosen["system_prompt"] or "", chosen["limit"]):
            if not self.finished.holds(task) and (chosen["log_empty_conversations"] or not task.empty):
                yield task


def _go_on(job: Assignment) -> int:
    # Read once before anything is loaded, so that an invalid line is an error at once.
    left, kept = sum(1 for _ in job.tasks()), len(job.finished)
    if not left:
        if job.values["json"]:
            print(json.dumps({"output": str(job.lines.path), "kept": kept, "written": 0, "failed": 0, "seconds": 0.0}))
            return 0
        print(f"{job.lines.path}: {kept} conversations, nothing left to answer")
        return 0
    job.failed.unlink(missing_ok=True)
    done, stop, seconds = asyncio.run(_answer(job, left))
    if job.values["json"]:
        print(json.dumps({"output": str(job.lines.path), "kept": kept, **asdict(done), "seconds": seconds}))
        return stop.exit_code or (1 if done.failed else 0)
    print(
        f"{job.lines.path}: {done.written} conversations written, {done.truncated} of them cut by length, "
        f"{done.empty} empty, {done.failed} without an answer" + (f"; {kept} were there" if kept else "")
    )
    if job.failed.exists():
        print(f"{job.failed}: why conversations have no answer or lack their last turns")
    if stop:
        print("stopped: conversations under way are not written; the same command goes on with them", file=sys.stderr)
    return stop.exit_code or (1 if done.failed else 0)


async def _answer(job: Assignment, left: int) -> tuple[Summary, Stop, float]:
    """Answer the conversations that are left; return also the seconds without loading."""
    from sametoken.data.journal import start_over
    from sametoken.data.synthesize import Synthesis

    values, kept, began = job.values, len(job.finished), time.monotonic()
    with open_progress() as progress, ExitStack() as stack:
        bar = progress.add_task("loading", total=kept + left, completed=kept)

        @cache
        def failures() -> Lines:
            return stack.enter_context(closing(start_over(job.failed)))

        def show(done: Summary) -> None:
            passed, answered = time.monotonic() - began, done.written + done.empty + done.failed
            words = (
                f"{answered / passed:.2f} conversations/s, {done.tokens / passed:.0f} tokens/s, {done.failed} failed"
            )
            progress.update(bar, completed=kept + answered, description=words)

        sources = _server if values["url"] is not None else _engine
        async with sources(job) as do:
            began = time.monotonic()
            log_empty = values["log_empty_conversations"]
            synthesis = Synthesis(do, job.lines, failures, log_empty=log_empty, progress=show)
            with cancel_at_signals() as stop:
                try:
                    await synthesis.run(job.tasks(), values["num_threads"] or _most_at_once(values))
                except asyncio.CancelledError:
                    if not stop:
                        raise
            return synthesis.summary, stop, time.monotonic() - began


def _most_at_once(values: Values) -> int:
    # More than a batch would only wait in the engine, and would be lost if the run is killed.
    return SERVER_THREADS if values["url"] is not None else int(values["max_batch_size"])


@asynccontextmanager
async def _server(job: Assignment) -> AsyncIterator[Answering]:
    from sametoken.data.answers import ServerAnswers
    from sametoken.data.synthesize import answering

    values = job.values
    async with _client(values) as client:
        yield answering(ServerAnswers(client, job.name, _sampling(values), values["retries"]), values["seed"])


@asynccontextmanager
async def _engine(job: Assignment) -> AsyncIterator[Answering]:
    llm, values = open_llm(job.name, job.values), job.values
    if values["chat"] and not llm.tokenizer.has_chat_template:
        raise ConfigError(f"{job.name} has no chat template; put chat_template.jinja beside it, or give --no-chat")

    from sametoken.data.answers import EngineAnswers
    from sametoken.data.synthesize import answering, given_questions
    from sametoken.engine.async_llm import AsyncLLM

    engine = AsyncLLM(llm)
    try:
        questions = given_questions if job.data is not None else _drawn_questions(engine, values)
        yield answering(EngineAnswers(engine, _sampling(values)), values["seed"], questions)
    finally:
        await engine.close()


def _drawn_questions(engine: AsyncLLM, values: Values) -> Callable[[Task], Questions]:
    from sametoken.data.self_prompts import SelfPrompts, lead, open_turn, user_turns

    # An unsuitable template is an error now, rather than for each conversation.
    open_turn(engine.llm.tokenizer, lead(values["system_prompt"] or ""))
    excluded = frozenset() if values["exclude"] is None else user_turns(values["exclude"])
    return SelfPrompts(engine, _sampling(values, "prompt_"), values["seed"], values["turns"], excluded).questions


def _sampling(values: Values, whose: str = "") -> AnswerSampling:
    from sametoken.data.answers import AnswerSampling

    return AnswerSampling(*(values[whose + name] for name in AnswerSampling._fields))
