"""`sametoken draft`: one command from a model to a head that serves it, in a given time, by the other commands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sametoken import embedded
from sametoken.commands.models import use_threads
from sametoken.commands.options import AS_JSON, THREADS, Option, Values
from sametoken.commands.terminal import tell
from sametoken.errors import ConfigError
from sametoken.interrupt import INTERRUPTED
from sametoken.options.declaration import Count, Positive

if TYPE_CHECKING:
    from sametoken.commands.draft_stages import DraftJob

OPTIONS = (
    Option(
        "data",
        list[str],
        None,
        "file of conversations whose answers the target writes anew, .jsonl or .json; may be given several times; "
        "without it: the target writes the users' turns too.",
        "FILE",
    ),
    Option("budget", str, "1h", "time for everything, for example 30m or 2h.", "TIME"),
    Option("output_dir", str, "sametoken-draft", "directory of the run, with the head in `head`.", "DIR"),
    Option("max_tokens", Positive, 256, "number of tokens of an answer to train on, at most."),
    Option("seed", Count, 0, "seed of answers and training."),
    AS_JSON,
    THREADS,
)
EXAMPLES = {
    "make a head in two hours, without any data": "sametoken draft MODEL --budget 2h --output-dir my-head",
    "for the conversations that you serve": "sametoken draft MODEL --data conversations.jsonl --budget 8h",
}


def command(model: str | None, values: Values) -> int:
    """Make a draft for a model: answers of the target, a trained head, its format and figures, and a model card.

    The speed of the stages is measured first; then the time is divided, and the plan is printed with the command of
    each stage. If the command is stopped at any time, the same command continues. The head is in DIR/head.
    """
    from sametoken.commands.draft_card import summary
    from sametoken.commands.draft_run import DraftRun
    from sametoken.commands.draft_stages import DraftState
    from sametoken.files import alone_in
    from sametoken.train.budget import parse_time

    budget_s = parse_time(values["budget"])
    use_threads(values["threads"])
    job, settings = _job(model or embedded.NAME, values)
    with alone_in(job.out):
        state = DraftState(job.out, settings)
        try:
            code = DraftRun(job, state, budget_s).go()
        except KeyboardInterrupt:
            code = INTERRUPTED
    if code:
        tell("stopped: the same command goes on")
        return code
    if values["json"]:
        print(json.dumps({"head": str(job.head), **state.content}))
        return 0
    for line in summary(job, state):
        print(line)
    return 0


def _job(model: str, values: Values) -> tuple[DraftJob, dict[str, Any]]:
    """Read the job, and the settings that decide its results; most refusals come from here."""
    from sametoken.checkpoint.hub import read_config
    from sametoken.checkpoint.identity import model_digest
    from sametoken.checkpoint.paths import user_path
    from sametoken.checkpoint.places import target_directory
    from sametoken.checkpoint.tokenizer_files import load_tokenizer
    from sametoken.commands.draft_stages import DraftJob
    from sametoken.data.held_out import FEWEST
    from sametoken.learning.modes import MODES
    from sametoken.model.config import ModelConfig
    from sametoken.prompts.conversations import read_records
    from sametoken.train.budget import draft_vocabulary
    from sametoken.train.dataset.extraction import parse_taps
    from sametoken.train.dataset.preparation import data_digest

    data = tuple(values["data"] or ())
    count = sum(1 for file in data for _ in read_records(file))  # another format is an error now
    if data and count < FEWEST:
        raise ConfigError(f"--data has {count} conversations, expected at least {FEWEST}; leave it out for none")
    directory = target_directory(model)
    config = ModelConfig.from_hf(read_config(directory))
    parse_taps(MODES[0], config.num_layers)
    if not load_tokenizer(directory).has_chat_template:
        raise ConfigError(f"{model} has no chat template; put chat_template.jinja beside it")
    job = DraftJob(
        model, user_path(values["output_dir"]), data, values["max_tokens"], values["seed"],
        draft_vocabulary(config.vocab_size), values["threads"],
    )  # fmt: skip
    settings = {
        "model": model_digest(directory), "data": data_digest(data) if data else None, "max_tokens": job.max_tokens,
        "seed": job.seed,
    }  # fmt: skip
    return job, settings
