"""`sametoken shard`: division of a file of conversations into shards, one per worker, and the reverse."""

from __future__ import annotations

import json
from pathlib import Path

from sametoken.checkpoint.paths import user_path
from sametoken.commands.options import AS_JSON, Option, Values, refuse_given, titled
from sametoken.errors import ConfigError
from sametoken.options.declaration import Positive

SPLIT = titled(
    "Cut a file",
    Option("input_path", str, None, "the file to cut, .jsonl or .json.", "FILE"),
    Option(
        "output_dir", str, None, "directory for the shards, which are named train-00000-00000.jsonl and so on.", "DIR"
    ),
    Option("max_lines_per_shard", Positive, 10_000, "number of lines of a shard at most."),
    Option("number", bool, True, "give conversations without an id their number in the file as conversation_id."),
)
COMBINE = titled(
    "Put shards together (--combine)",
    Option(
        "input_dir",
        str,
        None,
        "directory of the shards; its .jsonl files are put together in the order of their names.",
        "DIR",
    ),
    Option("output_path", str, None, "the file to write; it must not exist.", "FILE"),
)
OPTIONS = (Option("combine", bool, False, "put shards together instead of cutting a file."), AS_JSON, *SPLIT, *COMBINE)
ARGUMENT = None  # takes no model
EXAMPLES = {
    "cut a file": "sametoken shard --input-path prompts.jsonl --output-dir shards",
    "put the shards together": "sametoken shard --combine --input-dir shards --output-path answers.jsonl",
}


def command(_: None, values: Values) -> int:
    """Cut a file of conversations into shards, or with --combine put shards together. Ids and all keys are kept."""
    from sametoken.data.shards import combine, shard

    if values["combine"]:
        refuse_given(SPLIT, values, "cutting: leave out --combine")
        source, output = _path(values, "input_dir"), _path(values, "output_path")
        files, lines = combine(source, output)
        record, words = {"output": str(output), "lines": lines, "files": files}, f"{lines} lines of {files} files"
    else:
        refuse_given(COMBINE, values, "putting together: give --combine")
        source, output = _path(values, "input_path"), _path(values, "output_dir")
        made = shard(source, output, values["max_lines_per_shard"], number=values["number"])
        names = [file.name for file in made]
        record, words = {"output": str(output), "shards": names}, f"{len(made)} shards, {names[0]} to {names[-1]}"
    print(json.dumps(record) if values["json"] else f"{output}: {words}")
    return 0


def _path(values: Values, name: str) -> Path:
    """Path of a required option; raises ConfigError if it was not given."""
    if values[name] is None:
        raise ConfigError(f"--{name.replace('_', '-')} is missing; see sametoken shard --help")
    return user_path(values[name])
