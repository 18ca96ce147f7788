"""`sametoken prepare`: conversion of conversations to training samples, and hidden states of the target on disk.

Prints a summary of the samples: tokens that count in the loss, cut conversations, coverage of the draft vocabulary.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken import embedded
from sametoken.commands.models import use_threads
from sametoken.commands.options import AS_JSON, THREADS, Option, Values, refuse_given, settings_options, titled
from sametoken.commands.terminal import open_progress
from sametoken.errors import ConfigError
from sametoken.learning.modes import MODES, TRAINED
from sametoken.options.declaration import Count, Positive
from sametoken.options.engine import EngineConfig
from sametoken.options.training import ANSWER_ONLY
from sametoken.parallel.place import place_of, started

if TYPE_CHECKING:
    from rich.text import Text

    from sametoken.checkpoint.tokenizer import Tokenizer
    from sametoken.train.dataset.extraction import Reader
    from sametoken.train.dataset.hidden_states import HiddenSpec
    from sametoken.train.dataset.masks import Masked
    from sametoken.train.dataset.prepared import Origin, Prepared

MAX_LEN = 2048
RUN = ("dtype", "device")  # settings of the engine that runs the target
SERVERS = ("api_key", "concurrency")

HIDDEN = titled(
    "Hidden states on disk (--hidden-states)",
    Option(
        "taps",
        str,
        MODES[0],
        f"blocks whose outputs are written, from 0: {', '.join(TRAINED)}, or for example 2,8,13.",
        "LIST",
    ),
    Option(
        "hidden_dtype",
        str,
        "bfloat16",
        "number format of the hidden states on disk; fp8 has a scale per token and layer.",
        "bfloat16|fp8",
    ),
    Option(
        "budget", str, None, "number of bytes of hidden states at most, for example 50GB; without it: the free space."
    ),
    Option(
        "shard",
        str,
        None,
        "number of this process among those that share the work, as 0/4; without it: the launcher's.",
    ),
    Option(
        "url",
        list[str],
        None,
        "address of a vLLM server that computes them, started with the method extract_hidden_states; may be given "
        "several times. Without it the target runs in this process.",
        "URL",
    ),
    Option("api_key", str, None, "key of the servers; without it: the environment's OPENAI_API_KEY."),
    Option("concurrency", Positive, 8, "number of samples that a server has at a time."),
    Option(
        "shard_size",
        str,
        "256MiB",
        "number of bytes of a file of hidden states at most; processes share whole files.",
        "BYTES",
    ),
)
OPTIONS = (
    Option(
        "data",
        list[str],
        None,
        "file of conversations, .jsonl or .json; may be given several times.",
        "FILE",
    ),
    Option("output", str, None, "directory for the samples; if it is begun, the command goes on with it.", "DIR"),
    Option(
        "max_len",
        Positive,
        None,
        f"number of tokens of a sample at most; without it: {MAX_LEN}, or the model's context.",
    ),
    Option(
        "exclude",
        str,
        None,
        "file of held-out conversations; conversations with a user's turn that has 13 tokens in a row of one of its "
        "users' turns are left out.",
        "FILE",
    ),
    Option("end_of_turn", bool, True, "the token that ends an answer counts as said by the assistant."),
    Option(
        "all_tokens", bool, False,
        "every token counts, not only what the assistant says.",
        aliases=ANSWER_ONLY,
    ),
    Option(
        "chat_template_kwargs",
        str,
        None,
        'variables of the chat template, for example {"enable_thinking": false}.',
        "JSON",
    ),
    Option(
        "draft_vocab_size",
        Positive,
        None,
        "number of tokens that a draft may propose, the most frequent ones; without it: all.",
    ),
    Option("fill_vocabulary", bool, False, "fill the draft vocabulary with tokens that do not occur, if it is short."),
    Option("show", Count, 0, "number of samples to print: tokens that count in green, the rest dim."),
    Option("hidden_states", bool, False, "write the target's hidden states too, so that training need not run it."),
    AS_JSON,
    *HIDDEN,
    Option("revision", str, None, "branch, tag or commit of MODEL on the Hub; without it: its main branch."),
    *(option for option in settings_options(EngineConfig) if option.name in RUN),
    THREADS,
)  # fmt: skip
EXAMPLES = {
    "look at three samples": "sametoken prepare MODEL --data answers.jsonl --show 3",
    "write them": "sametoken prepare MODEL --data answers.jsonl --output prepared",
    "write the target's hidden states too":
        "sametoken prepare MODEL --data answers.jsonl --output prepared --hidden-states --budget 50GB",
    "let vLLM servers compute them":
        "sametoken prepare MODEL --data answers.jsonl --output prepared --hidden-states --url http://n1:8000",
}  # fmt: skip


def command(model: str | None, values: Values) -> int:
    """Turn conversations into training samples: token ids, a loss mask, and if wanted a draft vocabulary.

    The loss mask has the tokens that the assistant wrote. If writing hidden states is stopped, the same command
    continues. A directory that was made with other settings is refused.
    """
    _check(values)
    template = _template(values["chat_template_kwargs"])
    engine = EngineConfig(**{name: values[name] for name in RUN})
    use_threads(values["threads"])

    from sametoken.checkpoint.places import target_directory
    from sametoken.checkpoint.tokenizer_files import load_tokenizer
    from sametoken.train.dataset.preparation import tokenise

    directory = target_directory(model or embedded.NAME, values["revision"])
    tokenizer = load_tokenizer(directory)
    files = values["data"]
    if values["show"]:
        kept = {"end_of_turn": values["end_of_turn"], "all_tokens": values["all_tokens"], "template": template}
        for found in islice(tokenise(files, tokenizer, **kept), values["show"]):
            _print_sample(found.id, coloured(tokenizer, found.masked, _max_len(directory, values["max_len"])))
    if values["output"] is None:
        return 0
    prepared = _prepare(tokenizer, _origin(model, directory, tokenizer, values, template), values)
    if not values["json"]:
        for line in summary(prepared):
            print(line)
    states, seconds = None, 0.0
    if values["hidden_states"]:
        states, seconds = _write_hidden_states(prepared, str(directory), engine, values)
    if values["json"]:
        record = {"output": str(prepared.directory), **asdict(prepared.manifest.counts)}
        print(json.dumps({**record, "hidden_states": states and states.strip(), "hidden_states_s": seconds}))
    elif states is not None:
        print(states)
    return 0


def _check(values: Values) -> None:
    """Check all options that can be checked without files."""
    if not values["data"]:
        raise ConfigError("got no --data; expected --data FILE.jsonl, with conversations that the target answered")
    if values["output"] is None and not values["show"]:
        raise ConfigError("got no --output; expected --output DIR, or --show N to print samples only")
    if values["json"] and values["show"]:
        raise ConfigError("--json prints one object and --show prints samples; leave one of them out")
    if values["output"] == "":
        raise ConfigError("--output is empty; expected --output DIR")
    if values["output"] is None and values["hidden_states"]:
        raise ConfigError("--hidden-states needs a place: add --output DIR")
    if not values["hidden_states"]:
        refuse_given(HIDDEN, values, "hidden states: give --hidden-states too")
    if not values["url"]:
        refuse_given([each for each in HIDDEN if each.name in SERVERS], values, "servers: give --url too")
    if values["fill_vocabulary"] and values["draft_vocab_size"] is None:
        raise ConfigError("--fill-vocabulary has no use without --draft-vocab-size; leave it out")


def _template(given: str | None) -> dict[str, Any]:
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f'--chat-template-kwargs {given!r}: expected an object such as {{"enable_thinking": false}}')
    if taken := [name for name in ("messages", "add_generation_prompt") if name in found]:
        raise ConfigError(f"--chat-template-kwargs: {taken[0]} comes from the data; leave it out")
    return found


def _max_len(directory: Path, given: int | None) -> int:
    """Number of tokens of a sample, at most; limited by the target's context."""
    from sametoken.checkpoint.hub import read_config
    from sametoken.model.config import ModelConfig

    context = ModelConfig.from_hf(read_config(directory)).max_position
    if given is not None and given > context:
        raise ConfigError(f"--max-len {given}: the model was made for {context} positions; lower it")
    return min(MAX_LEN, context) if given is None else given


def _origin(
    model: str | None, directory: Path, tokenizer: Tokenizer, values: Values, template: dict[str, Any]
) -> Origin:
    from sametoken.checkpoint.hub import read_config
    from sametoken.checkpoint.identity import model_digest
    from sametoken.model.config import ModelConfig
    from sametoken.train.dataset.preparation import data_digest
    from sametoken.train.dataset.prepared import Origin

    return Origin(
        target=model or embedded.NAME,
        target_digest=model_digest(directory),
        tokenizer_digest=tokenizer.digest(),
        data_sha256=data_digest(values["data"]),
        vocab_size=ModelConfig.from_hf(read_config(directory)).vocab_size,
        max_len=_max_len(directory, values["max_len"]),
        end_of_turn=values["end_of_turn"],
        all_tokens=values["all_tokens"],
        template=template,
        draft_vocab_size=values["draft_vocab_size"],
        fill_vocabulary=values["fill_vocabulary"],
        exclude_sha256=None if values["exclude"] is None else data_digest([values["exclude"]]),
    )


def _prepare(tokenizer: Tokenizer, origin: Origin, values: Values) -> Prepared:
    from sametoken.train.dataset.preparation import prepare

    with _bar("preparing", None) as step:
        return prepare(values["data"], values["output"], tokenizer, origin, lambda: step(1), values["exclude"])


def summary(prepared: Prepared) -> Iterator[str]:
    """Yield the lines of a summary of prepared data: counts, draft vocabulary and warnings."""
    origin, counts = prepared.manifest.origin, prepared.manifest.counts
    share = 100 * counts.masked / counts.tokens
    yield f"{prepared.directory}: {counts.samples} samples of {counts.tokens} tokens for {origin.target}"
    yield f"  said by the assistant: {counts.masked} tokens ({share:.1f} %), {counts.distinct} different ones"
    yield f"  cut at {origin.max_len} tokens: {counts.truncated}, of which nothing was left to learn: {counts.dropped}"
    if origin.exclude_sha256 is not None:
        yield f"  left out, because they share text with held-out prompts: {counts.excluded} conversations"
    if counts.coverage is not None:
        yield f"  draft vocabulary: {origin.draft_vocab_size} tokens, {100 * counts.coverage:.2f} % of what is said"
    if counts.unserved:
        yield (
            f"  warning: {counts.unserved} samples are not what a server would send: the chat template shows past "
            "turns or the system text otherwise once there is an answer. Look at --show, and see --chat-template-kwargs"
        )
    if counts.unended:
        yield (
            f"  warning: {counts.unended} samples have an answer that no special token ends, so a draft cannot learn "
            "where to end; check eos_token_id and the chat template"
        )


def _write_hidden_states(prepared: Prepared, directory: str, engine: EngineConfig, values: Values) -> tuple[str, float]:
    """Write the missing hidden states of this process's part; return a summary of the directory, and the seconds
    without loading.
    """
    from sametoken.train.dataset.extraction import check_size, extract, parse_bytes, parse_part, spell

    budget = None if values["budget"] is None else parse_bytes(values["budget"])
    part = parse_part(values["shard"] or _rank())
    read, spec = _source(prepared, directory, engine, values)
    size, began = check_size(prepared, spec, budget), time.monotonic()
    with _bar("hidden states", prepared.manifest.counts.tokens // part[1]) as step:
        done = extract(prepared, read, spec, part, step)
    seconds = time.monotonic() - began
    blocks = f"of blocks {', '.join(map(str, spec.taps))} and " if spec.taps else ""
    line = (
        f"  hidden states: {blocks}after the last norm, {spec.dtype}, {spell(size)} in all; "
        f"{done.written} of {done.own} shards written now, part {part[0]} of {part[1]}"
        + (f"; {done.missing} of other parts are missing yet" if done.missing else "")
    )
    return line, seconds


def _source(prepared: Prepared, directory: str, engine: EngineConfig, values: Values) -> tuple[Reader, HiddenSpec]:
    """Source of the hidden states, and the description of their model and layers."""
    from sametoken.checkpoint.hub import read_config
    from sametoken.engine.load import DTYPES, load_models
    from sametoken.model.config import ModelConfig
    from sametoken.train.dataset.extraction import parse_bytes, parse_taps, run_here, spec_of

    config = ModelConfig.from_hf(read_config(Path(directory)))
    taps = parse_taps(values["taps"], config.num_layers)
    kept = (values["hidden_dtype"], parse_bytes(values["shard_size"], "shard-size"))
    if values["url"]:
        from sametoken.train.dataset.served_states import ServedStates, WantedStates
        from sametoken.train.targets import read_norm

        dtype = DTYPES[config.dtype if engine.dtype == "auto" else engine.dtype]
        norm = read_norm(Path(directory), dtype)
        wanted = WantedStates(taps, config.num_layers, config.hidden_size, dtype, norm)
        servers = ServedStates(
            values["url"], values["api_key"] or os.environ.get("OPENAI_API_KEY"), wanted, values["concurrency"]
        )
        return servers, spec_of(prepared, config.hidden_size, dtype, taps, *kept)
    decoder = load_models(directory, None, (None, None), engine).target
    spec = spec_of(prepared, config.hidden_size, decoder.dtype, taps, *kept)
    return run_here(prepared, decoder, taps), spec


def _rank() -> str:
    """Rank of this process and number of processes, as "0/1", from the variables of torchrun, mpirun or srun."""
    place = place_of(os.environ, started(os.environ))
    return f"{place.rank}/{place.size}"


def coloured(tokenizer: Tokenizer, masked: Masked, max_len: int) -> Text:
    """Text of a sample for a terminal, including special tokens; tokens beyond `max_len` are struck through."""
    from rich.text import Text

    from sametoken.train.dataset.masks import spans_of

    mask, shown = masked.mask, Text()
    borders = {0, len(mask), min(max_len, len(mask)), *chain.from_iterable(spans_of(mask))}
    for start, stop in pairwise(sorted(borders)):
        style = ("green" if mask[start] else "dim") + (" strike" if start >= max_len else "")
        shown.append(tokenizer.decode(masked.tokens[start:stop], skip_special_tokens=False), style)
    return shown


def _print_sample(name: str, text: Text) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.rule(name)
    console.print(text, soft_wrap=True)


@contextmanager
def _bar(purpose: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar within the block; yield the function that advances it."""
    with open_progress() as progress:
        task = progress.add_task(purpose, total=total)
        yield lambda steps: progress.advance(task, steps)
