"""Options of `sametoken synthesize`: conversations, conversations that the model writes itself, and a server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sametoken.commands.options import AS_JSON, Option, sampling_options, titled
from sametoken.options.declaration import Count, Positive, declared
from sametoken.options.sampling import SamplingParams

Threads = Annotated[int, Field(ge=1, le=65_536)]
SAMPLING = declared(SamplingParams)
LIMIT = Option(
    "limit", Positive, None, "number of conversations to take from the beginning of the data; without it: all."
)
COMMON = titled(
    "The conversations and their answers",
    Option("data", str, None, "file of conversations to answer, .jsonl or .json.", "FILE"),
    Option(
        "output",
        str,
        None,
        "file for the answered conversations, one a line; if it is begun, the command goes on with it.",
        "FILE",
        ("--output_path", "--output-path"),
    ),
    Option("model", str, None, "the same as MODEL; with --url the name that the server knows.", "NAME"),
    Option(
        "system_prompt",
        str,
        None,
        "system turn for conversations that have none; all words up to the next option.",
        "TEXT",
        words=True,
    ),
    *(option._replace(type=SAMPLING[option.name].hint) for option in sampling_options("temperature", "top_p")),
    Option(
        "max_tokens", Positive, 2048, "number of tokens of an answer at most.", aliases=("--max_token", "--max-token")
    ),
    Option(
        "seed", int, 0, "seed of the draw; the seed of each answer comes from it, the conversation's id and the turn."
    ),
    Option(
        "num_threads",
        Threads,
        None,
        "number of conversations at once; without it: 256, or the batch size of an engine in this process.",
    ),
    Option("chat", bool, True, "use the chat template; off: complete plain prompts."),
    Option("log_empty_conversations", bool, False, "write the ids of empty conversations, and a last line when done."),
    LIMIT,
    AS_JSON,
    Option(
        "self_prompts",
        Positive,
        None,
        "number of conversations of which the model writes the users' turns too, without any data.",
    ),
)
SELF = titled(
    "Conversations that the model begins itself (--self-prompts)",
    Option("turns", Positive, None, "number of users' turns of each of them; without it: a random number from 1 to 4."),
    Option("prompt_temperature", SAMPLING["temperature"].hint, 1.0, "temperature of the users' turns."),
    Option("prompt_top_p", SAMPLING["top_p"].hint, 0.95, "the top_p of the users' turns."),
    Option("prompt_max_tokens", Positive, 200, "number of tokens of a user's turn at most; a longer one is left out."),
    Option(
        "exclude",
        str,
        None,
        "file of conversations; no new conversation begins with a user's turn of it, which keeps held-out data apart.",
        "FILE",
    ),
)
REMOTE = titled(
    "A server that answers",
    Option("url", str, None, "ask this OpenAI-compatible server instead of an engine in this process."),
    Option("api_key", str, None, "key of the server; without it: the environment's OPENAI_API_KEY."),
    Option(
        "timeout",
        Annotated[float, Field(gt=0)],
        600.0,
        "number of seconds without any answer after which a request has failed.",
    ),
    Option(
        "retries",
        Count,
        6,
        "number of further attempts when a server is busy or away; each waits twice as long as the one before.",
    ),
)
