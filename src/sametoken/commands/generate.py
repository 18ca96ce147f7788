"""`sametoken generate`: completions on standard output, in the order of the prompts; everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sametoken.commands.given import given_prompts
from sametoken.commands.models import open_llm
from sametoken.commands.options import Option, Values, engine_options, sampling_of, sampling_options, titled
from sametoken.commands.terminal import open_progress
from sametoken.errors import ConfigError
from sametoken.prompts.sources import EncodedPrompt, encode_prompt

if TYPE_CHECKING:
    from sametoken.engine.completion import Chunk, Completion

OPTIONS = (
    *titled(
        "What to complete, and how the result is written",
        Option(
            "prompt",
            list[str],
            None,
            "a prompt; may be given several times; '-' reads all of standard input as one prompt.",
            "TEXT",
        ),
        Option(
            "data",
            str,
            None,
            "file of JSON lines, each with `prompt` or `messages`; '-' reads standard input.",
            "FILE",
        ),
        Option("chat", bool, False, "take each --prompt as the user's turn and apply the chat template."),
        Option("json", bool, False, "print one JSON object per completion."),
        Option("stream", bool, False, "write text as it is generated."),
    ),
    *sampling_options(),
    *engine_options(),
)
EXAMPLES = {
    "complete a prompt with the pair of models that comes with the package": 'sametoken generate --prompt "Hi!"',
    "ask a question, greedily, with n-gram drafts":
        'sametoken generate MODEL --chat --prompt "What is a KV cache?" --temperature 0 --method ngram',
    "complete a file of prompts as JSON lines": "sametoken generate MODEL --draft DRAFT --data prompts.jsonl --json",
}  # fmt: skip


def command(model: str | None, values: Values) -> int:
    """Complete prompts with a target, with or without a draft.

    The draft changes the speed, never a token (on CUDA: with --deterministic).
    """
    if values["json"] and values["stream"]:
        raise ConfigError("--json writes whole completions and --stream writes pieces; leave one of them out")
    sources = given_prompts(values["prompt"] or (), values["data"], values["chat"])
    sampling_of(values)  # a wrong value is refused before a model is loaded
    llm = open_llm(model, values)
    params = sampling_of(values, llm.default_sampling)
    prompts = [encode_prompt(llm.tokenizer, source) for source in sources]
    made = llm.stream([prompt.ids for prompt in prompts], params)
    if len(prompts) * params.n > 1 and not sys.stdout.isatty():  # where the results would run through the bar
        made = counted_chunks(made, len(prompts) * params.n)
    chunks = in_order(made, len(prompts), params.n)
    if values["json"]:
        failed = _write_json(chunks, prompts)
    else:
        failed = _write_text(chunks, len(prompts) * params.n, values["stream"])
    return 2 if failed else 0


def in_order(chunks: Iterable[Chunk], prompts: int, choices: int) -> Iterator[Chunk]:
    """Chunks of a batch in the order of the completions; chunks of later completions are kept back."""
    waiting: defaultdict[tuple[int, int], list[Chunk]] = defaultdict(list)
    turns = ((index, choice) for index in range(prompts) for choice in range(choices))
    turn = next(turns, None)
    for chunk in chunks:
        waiting[chunk.index, chunk.choice].append(chunk)
        while turn is not None and (ready := waiting.pop(turn, [])):
            yield from ready
            if ready[-1].completion is not None:
                turn = next(turns, None)


def counted_chunks(chunks: Iterable[Chunk], completions: int) -> Iterator[Chunk]:
    """Yield the chunks unchanged, with a bar on standard error of the completions that are done."""
    with open_progress() as bar:
        task = bar.add_task("completions", total=completions)
        for chunk in chunks:
            bar.advance(task, chunk.completion is not None)
            yield chunk


def _write_json(chunks: Iterable[Chunk], prompts: Sequence[EncodedPrompt]) -> int:
    """Write one record per completion; return how many ended with an error."""
    failed = 0
    for chunk in chunks:
        if chunk.completion is not None:
            failed += chunk.completion.error is not None
            record = {**chunk.completion.to_json(), "prompt": prompts[chunk.index].text}
            print(json.dumps(record), flush=True)
    return failed


def _write_text(chunks: Iterable[Chunk], completions: int, stream: bool) -> int:
    """Write texts, and a line about each on stderr; return how many ended with an error."""
    failed = 0
    for chunk in chunks:
        if stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        if (completion := chunk.completion) is not None:
            print("" if stream else completion.text, flush=True)
            name = f"[{completion.index}.{completion.choice}] " if completions > 1 else ""
            print(f"{name}{summary(completion)}", file=sys.stderr)
            if completion.error is not None:
                failed += 1
                print(f"{name}error: {completion.error}", file=sys.stderr)
    return failed


def summary(completion: Completion) -> str:
    """One-line summary of a completion: tokens, seconds, finish reason, method and acceptance length."""
    stats = completion.speculation
    return (
        f"{len(completion.token_ids)} tokens in {completion.seconds:.2f} s "
        f"({completion.tokens_per_second:.1f} tokens/s), "
        f"finish reason {completion.finish_reason}, method {stats.method}, "
        f"acceptance length {stats.acceptance_length:.2f}"
    )
