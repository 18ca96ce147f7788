"""What a user can set about an engine, checked at the edge; frozen inside.

An unknown key is an error that names the key and the nearest valid one. Names are those of TensorRT-LLM and vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from sametoken.errors import ConfigError, found_wrong, unknown_name

Method = Literal["draft_target", "eagle", "eagle3", "medusa", "ngram", "suffix", "auto", "none"]
METHODS: tuple[str, ...] = get_args(Method)
# What the methods that take weights are given as the draft.
MODEL_METHODS = {
    "draft_target": "a draft model",
    "eagle": "an EAGLE-1 or EAGLE-2 head",
    "eagle3": "an EAGLE-3 head",
    "medusa": "Medusa heads",
}
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int8_weight_only", "int4", "int4_g128"]
Positive = Annotated[int, Field(ge=1)]
MOST_THREADS = 1024  # more than any machine this is for, and few enough to start
# A command line has lists, and None where nothing was said.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: _listed(given))]
RootPath = Annotated[str, AfterValidator(lambda given: _path(given))]
Collector = Annotated[str, AfterValidator(lambda given: _collector(given))]
S = TypeVar("S", bound="Settings")


# EAGLE-2's names: what each sets here, and how much more it counts.
ALIASES = {"depth": ("max_draft_len", 0), "top_k": ("tree_top_k", 0), "total_tokens": ("max_total_draft_tokens", 1)}


def _listed(given: object) -> object:
    return tuple(given or ()) if given is None or isinstance(given, list) else given


def _path(given: str) -> str:
    path = given.rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("expected a path, for example /llm, of letters, digits and ._~-")
    return path


def _collector(given: str) -> str:
    if not re.match(r"https?://[^/]", given):
        raise ValueError("expected an http:// or https:// URL of OTLP over HTTP, for example http://localhost:4318")
    return given


class Settings(BaseModel):
    """Base of every group of settings: immutable, no unknown keys, `ConfigError` instead of a pydantic error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        unknown = [key for key in values if key not in type(self).model_fields]
        if unknown:
            raise ConfigError(unknown_name(f"{type(self).__name__} key", unknown[0], type(self).model_fields))
        try:
            super().__init__(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            if not where:  # of several keys together, which the message names
                raise ConfigError(f"{type(self).__name__}: {found_wrong(problem)}") from error
            raise ConfigError(
                f"{type(self).__name__}.{where} = {problem['input']!r}: {found_wrong(problem)}"
            ) from error

    @classmethod
    def of(cls: type[S], given: S | Mapping[str, Any] | None) -> S:
        """These settings from an instance, a mapping or nothing (the defaults)."""
        if isinstance(given, cls):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"got {type(given).__name__} {given!r}, expected {cls.__name__} or a mapping of its keys")
        return cls(**(given or {}))


class SpeculativeConfig(Settings):
    """How drafts are made.

    EAGLE-2's own names may be used too: `depth` for max_draft_len, `top_k` for tree_top_k, and `total_tokens`, which
    counts the root, for max_total_draft_tokens + 1.

    Attributes:
        method: None is what the draft is made for ("draft_target", or that of a head: "eagle", "eagle3", "medusa"),
            without a draft "none"; "auto" is all drafters there are, and the engine chooses one per request and step.
        max_draft_len: longest path of a draft (K), in tokens.
        adaptive: choose each step's length, 0 included, for the most tokens per second; off is always `max_draft_len`.
        draft_len_schedule: batch size -> longest path for batches up to that size, none above the largest; the
            smallest size has `max_draft_len`.
        max_concurrency: draft in batches up to this size only.
        acceptance_window: finished requests whose acceptance is averaged for acceptance_length_threshold; 0 is off.
        acceptance_length_threshold: drafting ends for good when, over acceptance_window requests, fewer draft tokens
            than this are accepted per forward with a draft.
        tree_top_k: draft_target, eagle, eagle3: branches that each level keeps and expands; 1 is a chain.
        max_total_draft_tokens: tokens of a draft, tree or chain, best score first; None is
            `max_draft_len * tree_top_k`. medusa: nodes of its own tree, the first ones; None is all.
        max_matching_ngram_size, min_matching_ngram_size: ngram: suffix lengths that are looked up, longest first.
        is_use_oldest: ngram: continue the oldest match instead of the newest.
        is_public_pool: ngram: share n-grams over requests.
        suffix_decoding_max_tree_depth: suffix: longest match plus draft.
        suffix_decoding_max_cached_requests: suffix: finished outputs that stay searchable.
        suffix_decoding_max_spec_factor: suffix: draft at most this many tokens per matched token.
        suffix_decoding_min_token_prob: suffix: drop guesses less probable than this.
    """

    method: Method | None = None
    max_draft_len: Annotated[int, Field(ge=1, le=128)] = 4
    adaptive: bool = True
    draft_len_schedule: dict[Positive, Annotated[int, Field(ge=0)]] | None = None
    max_concurrency: Positive | None = None
    acceptance_window: Annotated[int, Field(ge=0)] = 0
    acceptance_length_threshold: Annotated[float, Field(ge=0)] = 0.0
    tree_top_k: Annotated[int, Field(ge=1, le=32)] = 1
    max_total_draft_tokens: Annotated[int, Field(ge=1, le=512)] | None = None
    max_matching_ngram_size: Annotated[int, Field(ge=1, le=64)] = 3
    min_matching_ngram_size: Annotated[int, Field(ge=1, le=64)] = 1
    is_use_oldest: bool = False
    is_public_pool: bool = False
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=2)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1

    def __init__(self, **values: Any) -> None:
        for alias, (name, roots) in ALIASES.items():
            if alias not in values:
                continue
            if name in values:
                raise ConfigError(f"{alias} and {name} are the same setting; give one of them")
            given = values.pop(alias)
            if isinstance(given, bool) or not isinstance(given, int) or given <= roots:
                raise ConfigError(f"SpeculativeConfig.{alias} = {given!r}: expected a whole number above {roots}")
            values[name] = given - roots
        super().__init__(**values)

    @property
    def longest(self) -> int:
        """Tokens of the longest path that the length and the budget of a draft both allow."""
        return min(self.max_draft_len, self.max_total_draft_tokens or self.max_draft_len)

    @model_validator(mode="after")
    def _agree(self) -> SpeculativeConfig:
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise ValueError(
                f"min_matching_ngram_size {self.min_matching_ngram_size} exceeds "
                f"max_matching_ngram_size {self.max_matching_ngram_size}"
            )
        if bool(self.acceptance_window) != bool(self.acceptance_length_threshold):
            raise ValueError("acceptance_window and acceptance_length_threshold work together; set both or neither")
        schedule = self.draft_len_schedule
        if schedule is not None:
            if self.max_concurrency is not None:
                raise ValueError("draft_len_schedule and max_concurrency exclude each other; set one")
            if not schedule:
                raise ValueError("draft_len_schedule is empty; expected for example {4: 4, 16: 2}")
            smallest = min(schedule)
            if schedule[smallest] != self.max_draft_len or max(schedule.values()) > self.max_draft_len:
                raise ValueError(
                    f"draft_len_schedule allows {schedule[smallest]} tokens up to batch {smallest} and at most "
                    f"{max(schedule.values())}; expected max_draft_len {self.max_draft_len} for both"
                )
        return self

    @property
    def schedule(self) -> dict[int, int] | None:
        """Longest path by batch size, whichever way it was said."""
        if self.max_concurrency is not None:
            return {self.max_concurrency: self.max_draft_len}
        return self.draft_len_schedule


class KVCacheConfig(Settings):
    """The page pool.

    Attributes:
        tokens_per_block: page size.
        enable_block_reuse: keep full pages of finished requests for prompts with the same beginning.
        max_tokens: tokens that the pool holds; None plans for every row at full context, as far as memory goes.
        free_memory_fraction: share of the memory left after the weights that the pool may take.
    """

    tokens_per_block: Annotated[int, Field(ge=1, le=1024)] = 32
    enable_block_reuse: bool = True
    max_tokens: Positive | None = None
    free_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9


class EngineConfig(Settings):
    """The engine around the model.

    Attributes:
        dtype: of weights, activations and cache; "auto" is the checkpoint's own (bfloat16 for float16 on CPU).
        device: "auto" is CUDA where there is one, otherwise the CPU.
        max_batch_size: sequences that run together.
        max_num_tokens: tokens of one step over the batch, which bounds the pieces that prompts are cut into.
        max_mixed_prefill_tokens: prompt tokens at most of a step that also decodes.
        max_prefill_share: of the time while streams run, prompts may take at most this share: at 0.5 a token of a
            stream takes twice as long on average while a prompt is read. 1 is no limit: most tokens a second in all.
        max_seq_len: prompt plus output; None is the model's context.
        deterministic: give a token the same bits whatever is computed beside it, so that drafts and batches cannot
            change the output even in bfloat16; None is on for the CPU and off for CUDA, where fixed tiles cost time.
        quantization: what the target's weights are rounded to when they are loaded (CPU): int8 and int4 multiply with
            8-bit activations, int8 has a scale per output, int4 per 32 inputs, int4_g128 per 128.
        draft_quantization: the same for a draft model.
        cuda_graphs: on CUDA, capture whole decoding steps and run them one ahead of the host; the CPU has no graphs.
        tokenizer: directory or Hub id of another tokenizer for the same token ids; None is the target's.
        chat_template: file of a chat template in Jinja, or its text; None is the tokenizer's.
        generation_config: where sampling parameters that a request leaves out come from: "auto" is the model's
            generation_config.json, then our defaults; "none" is our defaults alone ("vllm" says the same).
    """

    dtype: DType = "auto"
    device: str = "auto"
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    max_num_tokens: Annotated[int, Field(ge=2)] = 512
    max_mixed_prefill_tokens: Positive = 64
    max_prefill_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_seq_len: Annotated[int, Field(ge=2)] | None = None
    deterministic: bool | None = None
    quantization: Quantization = "none"
    draft_quantization: Quantization = "none"
    cuda_graphs: bool = True
    tokenizer: str | None = None
    chat_template: str | None = None
    generation_config: Literal["auto", "none", "vllm"] = "auto"


class ServerConfig(Settings):
    """The HTTP server around an engine.

    Attributes:
        host: address to listen on; 0.0.0.0 is every interface of this machine.
        port: port to listen on; 0 takes a free one.
        api_key: a key that clients must send as a bearer token, repeatable; none lets everyone in. SAMETOKEN_API_KEY
            holds more, separated by commas.
        served_model_name: what clients call the model, repeatable, the first is the one in replies; none is MODEL.
        max_queue: sequences that may wait for a place in the batch; a request beyond them is answered with 429.
        request_timeout: seconds after which a request is given up, None for never.
        max_body: bytes of a request's body at most.
        drain_seconds: how long open requests may go on after SIGTERM, SIGHUP or the first SIGINT.
        max_chunks_per_second: chunks that all streams together get at most: of a busy server a chunk then has the
            tokens of several steps, held for at most 0.05 s; a stream's first never waits.
        reasoning_parser: how the model marks what it thinks before it speaks, which replies then have apart; "auto"
            finds it by the marks in the chat template, "none" leaves it in the text.
        cors_origin: web origins whose pages may call this server, repeatable; "*" is every one, none is off.
        keep_alive: seconds that a connection without a request stays open; more than a proxy before it keeps one,
            which may otherwise send into a connection that closes.
        root_path: path below which a proxy offers this server, for the pages and the OpenAPI document; requests may
            come with it or without.
        ssl_certfile: certificate of the server, in PEM, with its chain; with one the server speaks HTTPS.
        ssl_keyfile: its key; None is in the certificate's file.
        ssl_ca_certs: authorities in PEM that a client's certificate must come from.
        ssl_cert_reqs: whether clients need a certificate: 0 no, 1 it is checked if there is one, 2 yes.
        log_level: the least important messages that are logged.
        log_format: lines as text, or each as a JSON object.
        access_log: log a line per request; probes that went well are at level debug.
        otlp_traces_endpoint: URL of a collector that is sent a trace of every request by OTLP over HTTP, for example
            http://localhost:4318; None is off. Needs the extra `otel`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: Names = ()
    served_model_name: Names = ()
    max_queue: Annotated[int, Field(ge=0)] = 256
    request_timeout: Annotated[float, Field(gt=0)] | None = None
    max_body: Annotated[int, Field(ge=1024)] = 8 * 2**20
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    max_chunks_per_second: Annotated[float, Field(gt=0)] = 500.0
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "deepseek-r1", "openai_gptoss"] = "auto"
    cors_origin: Names = ()
    keep_alive: Annotated[float, Field(ge=0)] = 75.0
    root_path: RootPath = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: Annotated[int, Field(ge=0, le=2)] = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    access_log: bool = True
    otlp_traces_endpoint: Collector | None = None

    @model_validator(mode="after")
    def _certificates(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs go with ssl_certfile; give it too")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("ssl_cert_reqs 1 and 2 need ssl_ca_certs, the authorities of clients; give them")
        return self
