"""`sametoken export`: a head for another engine; refused with the reason if that engine cannot run the head."""

from __future__ import annotations

import json

from sametoken.checkpoint.paths import user_path
from sametoken.commands.options import AS_JSON, Argument, Option, Values
from sametoken.commands.terminal import open_progress
from sametoken.errors import ConfigError, unknown_name

ARGUMENT = Argument(str, "directory, training run or Hub id of a head, of any trainer.", "HEAD")
HEAD_DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = (
    Option("to", str, "hf", "engine: hf (our own, which the others read where they can).", "hf|vllm|sglang|..."),
    Option("output", str, None, "directory to write; it may be empty or hold a head.", "DIR"),
    Option("target", str, None, "the model that the head drafts for: directory, Hub id or 'embedded'.", "MODEL"),
    Option(
        "taps",
        str,
        None,
        "target layers whose outputs the head reads, 0-based, instead of those that the files name.",
        "LIST",
    ),
    Option("dtype", str, None, "number format of the weights; without it: that of the files.", "|".join(HEAD_DTYPES)),
    Option("force", bool, False, "write into a directory that holds other files, which stay."),
    AS_JSON,
)
EXAMPLES = {
    "write a head for vLLM": "sametoken export head --to vllm --target MODEL --output head-vllm",
    "write it in bfloat16": "sametoken export head --target MODEL --output head-bf16 --dtype bfloat16",
}


def command(name: str, values: Values) -> int:
    """Write a head for vllm, sglang, trtllm, speculators or hf, converting layer ids and names."""
    for needed in ("output", "target"):
        if values[needed] is None:
            raise ConfigError(f"--{needed} is missing; expected a {'directory' if needed == 'output' else 'model'}")
    if values["dtype"] not in (None, *HEAD_DTYPES):
        raise ConfigError(unknown_name("dtype", values["dtype"], HEAD_DTYPES))

    import torch

    from sametoken.checkpoint.hub import read_config
    from sametoken.checkpoint.places import draft_directory, target_directory
    from sametoken.heads.files import Files
    from sametoken.heads.kind import ENGINES
    from sametoken.heads.read import read_head, stored_dtype
    from sametoken.heads.registry import head_kind
    from sametoken.heads.taps import parse_layers
    from sametoken.heads.write import write_head
    from sametoken.model.config import ModelConfig

    if values["to"] not in ENGINES:
        raise ConfigError(unknown_name("engine", values["to"], ENGINES))
    target = ModelConfig.from_hf(read_config(target_directory(values["target"])))
    taps = None if values["taps"] is None else parse_layers(values["taps"], target.num_layers)
    directory = draft_directory(name)
    dtype = stored_dtype(directory) if values["dtype"] is None else getattr(torch, values["dtype"])
    output = user_path(values["output"])
    with open_progress() as progress:
        task = progress.add_task("reading tensors", total=len(Files.of(directory).seen) + 1)  # the last step is writing
        loaded = read_head(directory, target, dtype, "cpu", pack=False, arrived=lambda: progress.advance(task))
        head = loaded.module if taps is None else head_kind(loaded.config).with_taps(loaded.module, taps, target)
        progress.update(task, description="writing")
        advice = write_head(
            head, output, target, layout=values["to"], target_name=values["target"], dtype=dtype, force=values["force"]
        )
        progress.advance(task)
    named = str(dtype).removeprefix("torch.")
    assumed = [note for note in loaded.notes if taps is None or not note.startswith("taps ")]
    next_steps = [line.replace("DIR", str(output)) for line in advice]
    if values["json"]:
        record = {"output": str(output), "engine": values["to"], "dtype": named}
        print(json.dumps({**record, "assumed": assumed, "advice": next_steps}))
        return 0
    print(f"{output}: the head for {ENGINES[values['to']]}, {named}")
    for line in [*(f"assumed: {note}" for note in assumed), *next_steps]:
        print(line)
    return 0
