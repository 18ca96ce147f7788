"""`sametoken deploy shards`: answers to shards of conversations, by a server that is started on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sametoken.checkpoint.paths import user_path
from sametoken.commands import planning, synthesize_options
from sametoken.commands.elsewhere import everywhere, output_directory
from sametoken.commands.options import Chosen, Option, Values, given_words, titled
from sametoken.commands.terminal import tell
from sametoken.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from sametoken.deploy.shards import ShardWork

Port = Annotated[int, Field(ge=0, le=65_535)]
MOST = 999_999  # largest number of shards
SHARDS = titled(
    "The shards",
    Option("data", str, None, "directory of the shards that `sametoken shard` wrote.", "DIR"),
    Option("output", str, None, "directory for the answers, output-00000-00000.jsonl and so on.", "DIR"),
    Option("start", Annotated[int, Field(ge=0, le=MOST)], 0, "number of the first shard."),
    Option(
        "shards", Annotated[int, Field(ge=1, le=MOST)], 10, "number of shards; on Slurm those of each node.",
        aliases=("--jobs-per-node", "--jobs_per_node"),
    ),
)  # fmt: skip
SERVER = titled(
    "The server",
    Option("engine", str, planning.OURS, "engine of the server.", "|".join(planning.ENGINES)),
    Option("serve_args", str, None, "further words for `sametoken serve`, for example '--draft HEAD'.", "TEXT"),
    Option("port", Port, 0, "port of the server, which only its own machine reaches; 0 takes a free one."),
    Option(
        "startup_timeout", Annotated[float, Field(gt=0)], 600.0, "number of seconds that the server may take to start."
    ),
)
ELSEWHERE = ("data", "output", "model", "limit", "json", "self_prompts", "log_empty_conversations", "url", "api_key")
ANSWERS = tuple(each for each in (*synthesize_options.COMMON, *synthesize_options.REMOTE) if each.name not in ELSEWHERE)
OPTIONS = (*SHARDS, *SERVER, *ANSWERS)
EXAMPLES = {
    "answer the shards 0 to 9": "sametoken deploy shards MODEL --data shards --output answers",
    "answer the next ones with vLLM":
        "sametoken deploy shards MODEL --data shards --output answers --start 10 --engine vllm",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Answer shards of conversations on this machine: start a server, let it answer, and end it.

    A scheduler runs this on every machine of a job; `sametoken deploy slurm synthesize` does. Shards that are done are
    skipped, and a shard that was begun goes on where it stopped.
    """
    from sametoken.deploy.shards import answer_shards

    work, numbers = work_of(model, values), numbers_of(values)
    return answer_shards(work, numbers, tell)


def work_of(model: str | None, values: Chosen) -> ShardWork:
    """Work of each machine, from the command's options.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    from sametoken.deploy.shards import ShardWork

    if values["engine"] not in planning.ENGINES:
        raise ConfigError(unknown_name("engine", values["engine"], planning.ENGINES))
    engine = () if values["engine"] == planning.OURS else ("--engine", values["engine"])
    return ShardWork(
        data=Path(os.path.abspath(user_path(_given(values, "data")))),
        output=output_directory(_given(values, "output")),
        serve=(everywhere(model), *engine, *planning.shell_words(values, "serve_args")),
        synthesize=tuple(given_words(ANSWERS, values)),
        port=values["port"],
        startup=values["startup_timeout"],
    )


def numbers_of(values: Values) -> range:
    """Numbers of the shards to answer, from the command's options.

    Raises:
        ConfigError: none of these shards exists.
    """
    from sametoken.data.shards import FILE_NAME

    numbers = range(values["start"], values["start"] + values["shards"])
    directory = user_path(_given(values, "data")).absolute()
    if not any((directory / FILE_NAME.format(number)).is_file() for number in numbers):
        raise ConfigError(
            f"--data {directory} has none of the shards {numbers[0]} to {numbers[-1]}; expected "
            f"{FILE_NAME.format(numbers[0])} and so on, which `sametoken shard` writes"
        )
    return numbers


def _given(values: Values, name: str) -> str:
    if values[name] is None:
        raise ConfigError(f"--{name} is missing; expected --data DIR --output DIR")
    return str(values[name])
