"""Options of `sametoken bench`: workloads and results, an engine in this process, and a server."""

from __future__ import annotations

from typing import Annotated, get_origin

from pydantic import Field

from sametoken.commands.options import AS_JSON, Option, engine_options, several, titled
from sametoken.options.declaration import Positive
from sametoken.options.engine import EngineConfig
from sametoken.options.sampling import SamplingParams
from sametoken.options.serving import CACHE
from sametoken.options.speculation import SpeculativeConfig

REUSE = CACHE + "enable_block_reuse"
SWEPT = ("max_draft_len", "tree_top_k", "max_batch_size", REUSE)  # options that the sweep sets itself
CONTROLLER = (
    "measure the controller too, beside the fixed lengths; it chooses the draft length of every step, from 0 to the "
    "longest of max_draft_len."
)
LENGTHS, BATCHES = several(SpeculativeConfig, "max_draft_len"), several(EngineConfig, "max_batch_size")
TEMPERATURES, RATES = several(SamplingParams, "temperature"), tuple[Annotated[float, Field(ge=1e-3)], ...]
ENGINE = tuple(
    option._replace(help=CONTROLLER) if option.name == "adaptive" else option
    for option in engine_options()
    if option.name not in SWEPT
)

COMMON = titled(
    "What is measured, and where the result goes",
    Option(
        "workload",
        list[str],
        None,
        "where prompts come from: builtin, a file, or hf:org/name[:split[:column]]; without it: builtin.",
        "NAME",
        ("--data",),
    ),
    Option(
        "limit",
        Positive,
        None,
        "number of prompts to take of each workload, evenly from its categories; without it: all.",
        aliases=("--num-prompts", "--num_prompts"),
    ),
    Option(
        "category",
        list[str],
        None,
        "take only prompts of this category; may be given several times; without it: all.",
        "NAME",
    ),
    Option("temperature", TEMPERATURES, "0", "temperatures, separated by commas; 0 is greedy.", "LIST"),
    Option("max_tokens", Positive, 64, "number of tokens of an output at most."),
    Option("ignore_eos", bool, False, "go on after the model's own end tokens, up to --max-tokens."),
    Option(
        "repeat",
        Annotated[int, Field(ge=1, le=1000)],
        5,
        "number of rounds of plain and speculative decoding in turn; the confidence interval comes from them.",
    ),
    Option("seed", int, 0, "seed of the first request; each further request has the next."),
    Option("out", str, None, "directory for the results of the run as JSON; without it: they are not written.", "DIR"),
    Option("explain", bool, False, "explain in words why the run is fast or slow, and recommend settings."),
    AS_JSON,
)
IN_PROCESS = titled(
    "An engine in this process",
    Option(
        "max_draft_len", LENGTHS, "4", "longest drafts to compare with plain decoding, separated by commas.", "LIST"
    ),
    Option(
        "tree_top_k",
        several(SpeculativeConfig, "tree_top_k"),
        "1",
        "numbers of branches that each level of a draft has, separated by commas; 1 is a chain.",
        "LIST",
    ),
    Option("batch", BATCHES, "1", "numbers of requests that run together, separated by commas.", "LIST"),
    Option(
        "prompt_len",
        tuple[Positive, ...],
        None,
        "numbers of tokens that prompts are cut or repeated to, separated by commas; without it: as they are.",
        "LIST",
    ),
    Option(
        "turns",
        Positive,
        1,
        "number of turns of a conversation to run at most; later turns follow the answers of plain decoding.",
    ),
)
LOCAL = (*IN_PROCESS, *ENGINE)
REMOTE = titled(
    "A server",
    Option("url", str, None, "measure this OpenAI-compatible server instead of an engine in this process."),
    Option("baseline_url", str, None, "address of a server with the same model without drafts, to compare with."),
    Option("api_key", str, None, "key of the servers; without it: the environment's OPENAI_API_KEY."),
    Option(
        "concurrency",
        tuple[Positive, ...],
        None,
        "closed loads: numbers of requests that are kept running, separated by commas; without it: 1.",
        "LIST",
    ),
    Option("rate", RATES, None, "open loads: requests per second at Poisson times, separated by commas.", "LIST"),
    Option(
        "requests",
        Positive,
        None,
        "number of requests per load and round; without it: one per prompt, and at least two per connection.",
    ),
    Option(
        "timeout",
        Annotated[float, Field(gt=0)],
        120.0,
        "number of seconds without any answer after which a request has failed.",
    ),
    Option("continuous_usage", bool, False, "request token counts in every chunk, an extension of some servers."),
)
LISTS = {option.name: option for option in (*COMMON, *LOCAL, *REMOTE) if get_origin(option.type) is tuple}
