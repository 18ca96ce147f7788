"""Options of the HTTP server."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from sametoken.errors import RequestError
from sametoken.options.declaration import Elsewhere, Names, Settings, Shown
from sametoken.options.sampling import SamplingParams


def _path(given: str) -> str:
    path = given.rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("expected a path, for example /llm, of letters, digits and ._~-")
    return path


def _addresses(given: str) -> str:
    stated = [each.strip() for each in given.split(",")]
    if not all(stated):
        raise ValueError("expected an address, or several with commas between them, for example 127.0.0.1,::1")
    return ",".join(stated)


def _collector(given: str) -> str:
    if not re.match(r"https?://[^/]", given):
        raise ValueError("expected an http:// or https:// URL of OTLP over HTTP, for example http://localhost:4318")
    return given


def _is_path(address: str) -> bool:
    return address.endswith(".sock")


RootPath = Annotated[str, AfterValidator(_path)]
Collector = Annotated[str, AfterValidator(_collector)]
MOST_REPLICAS = 64


class ServerConfig(Settings):
    """The HTTP server."""

    host: Annotated[str, AfterValidator(_addresses)] = "127.0.0.1"
    """address to listen on, or several with commas between them; 0.0.0.0 is every interface of this machine, a path
    that ends in .sock a Unix socket."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """port to listen on; 0 takes a free one."""
    uds: str | None = None
    """path of a Unix socket to listen on in the place of host and port; without it: none."""
    data_parallel_size: Annotated[int, Field(ge=1, le=MOST_REPLICAS), Shown(("--dp", "-dp", "--dp-size"))] = 1
    """number of replicas behind the port. Each is a process with a copy of the model, its share of the threads and of
    the memory for the KV cache, and on CUDA a GPU of its own. A request goes to the replica that has most of its prompt
    in the cache, unless that one is busier."""
    api_key: Names = ()
    """a key that clients must send as a bearer token; may be given several times; without it: clients need no key.
    SAMETOKEN_API_KEY holds further keys, separated by commas."""
    share_between_keys: Annotated[bool, Shown(("--suffix-shared",))] = False
    """let requests of one API key reuse those of others: their prompts in the cache, and their outputs for guesses.
    That is faster where keys have texts in common, but the time of a reply then reveals the requests of others."""
    allowed_host: Names = ()
    """further name by which clients may call this server where it listens on a loopback address and has no key; may be
    given several times; without it: `localhost` and IP addresses alone, so that no web page can reach it by a name of
    its own."""
    served_model_name: Names = ()
    """name by which clients call the model; may be given several times, replies use the first; without it: MODEL."""
    any_model: bool = False
    """answer requests whatever model they name, in the words of llama-server; its paths without /v1 always do."""
    default_sampling: Annotated[dict[str, Any] | None, Shown(("--override-generation-config",))] = None
    """sampling parameters of requests that do not say otherwise, as JSON; they win over the model's
    generation_config.json."""
    default_template_options: Annotated[dict[str, Any] | None, Shown(("--default-chat-template-kwargs",))] = None
    """variables of the chat template for requests that do not say otherwise, as JSON."""
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    """number of tokens that the model may think, at most, for requests that name no limit or -1; then the mark follows
    that ends the thinking; without it, and with a model that marks no thinking: no limit."""
    trust_request_chat_template: bool = False
    """let requests bring a chat template of their own as `chat_template`."""
    ignore_unknown_fields: bool = False
    """leave out a field of a request that this server does not have, as vLLM does; off: refuse the request."""
    enable_force_include_usage: bool = False
    """have the usage of its choice in every chunk of every stream, whatever its request says."""
    enable_per_request_metrics: bool = False
    """report the seconds that a request waited, read its prompt and generated, as `metrics` of a reply with one choice;
    a stream has them with the usage at its end."""
    return_tokens_as_token_ids: bool = False
    """show the tokens of log-probabilities by id in replies to requests that do not set it."""
    model_tags: Names = ()
    """tag of the model, for people, which GET /models shows; may be given several times; without it: none."""
    ui: Annotated[bool, Shown(("--webui/--no-webui",))] = True
    """serve the playground at /."""
    slots: bool = True
    """show the places of the batch at GET /slots, as llama-server does."""
    slot_save_path: str | None = None
    """directory in which POST /slots/ID?action=save writes what the KV cache holds of a prompt, and `restore` reads it;
    without it: none is written."""
    metrics: bool = True
    """serve metrics at GET /metrics."""
    verbose: bool = False
    """add `__verbose` to replies in llama-server's words: the prompt as the model read it, and the reply in the form of
    /completion."""
    reported_version: str | None = None
    """version that /version reports, by which clients of another server choose what they send; without it: the version
    of sametoken, which /version also has as `sametoken`."""
    max_stored_responses: Annotated[int, Field(ge=0)] = 256
    """number of responses that are kept for `previous_response_id` and for GET /v1/responses/ID, the last ones, in
    memory and in 64 MiB at most; 0 keeps none."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """number of sequences that may wait for a place in the batch; if more would wait, a request is refused with 429."""
    request_timeout: Annotated[float, Field(gt=0)] | None = None
    """seconds after which a request that has not finished is cancelled; without it: never."""
    sleep_idle_seconds: Annotated[float, Field(gt=0)] | None = None
    """seconds without a request after which the memory of the KV cache, and of weights that lie in a mapped file, goes
    back to the system; the next request takes it again and reads its prompt anew; without it: 600 seconds for the KV
    cache alone."""
    max_body: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """largest body of a request, in bytes."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """seconds that open requests may still take after SIGTERM, SIGHUP or the first SIGINT."""
    max_chunks_per_second: Annotated[float, Field(gt=0)] = 500.0
    """number of chunks per second that all streams together get at most. On a busy server a chunk then has the tokens
    of several steps, which wait for at most 0.05 s. The first chunk of a stream never waits."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "deepseek-r1", "openai_gptoss"] = "auto"
    """how the model marks its reasoning. Replies have the reasoning in a field of its own. "auto" finds the marks in
    the chat template, "none" leaves the reasoning in the text."""
    cors_origin: Names = ()
    """web origin whose pages may call this server; may be given several times; "*" is every one, "localhost" every
    page of this machine; without it: none."""
    cors_credentials: bool = False
    """let pages of those origins send what the browser keeps for this server, such as cookies of a proxy in front."""
    keep_alive: Annotated[float, Field(ge=0)] = 75.0
    """seconds that a connection without a request stays open. It must be longer than the idle timeout of a proxy in
    front of the server, which could otherwise send a request into a connection that is being closed."""
    root_path: Annotated[RootPath, Elsewhere("llama-server api_prefix")] = ""
    """path below which a proxy offers this server, for the pages and the OpenAPI document; requests may come with it or
    without it."""
    ssl_certfile: Annotated[str | None, Elsewhere("llama-server ssl_cert_file")] = None
    """certificate of the server with its chain, in PEM; with it the server speaks HTTPS."""
    ssl_keyfile: Annotated[str | None, Elsewhere("llama-server ssl_key_file")] = None
    """private key of the certificate, in PEM; without it: the certificate's file has it too."""
    ssl_ca_certs: str | None = None
    """certificates of the authorities, in PEM, that a client's certificate must come from."""
    ssl_cert_reqs: Annotated[int, Field(ge=0, le=2)] = 0
    """whether clients need a certificate: 0 no, 1 a certificate is checked if there is one, 2 yes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least important level of messages that are logged."""
    log_format: Literal["text", "json"] = "text"
    """whether the log has lines of text, or a JSON object per line."""
    access_log: bool = True
    """log a line per request; successful probes of health and metrics are at level debug."""
    enable_request_id_headers: bool = True
    """have the id of its request in the header X-Request-Id of every answer."""
    otlp_traces_endpoint: Collector | None = None
    """URL of a collector that is sent a trace of every request by OTLP over HTTP, for example http://localhost:4318;
    without it: off. Needs the extra `otel`."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Addresses of networks to listen on."""
        return () if self.uds is not None else tuple(each for each in self.host.split(",") if not _is_path(each))

    @property
    def paths(self) -> tuple[str, ...]:
        """Unix sockets to listen on."""
        return (self.uds,) if self.uds is not None else tuple(filter(_is_path, self.host.split(",")))

    @field_validator("default_sampling")
    @classmethod
    def _known_sampling(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            SamplingParams.from_mapping(given or {})
        except RequestError as error:
            raise ValueError(str(error)) from error
        return given

    @model_validator(mode="after")
    def _certificates(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs go with ssl_certfile; give it too")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("ssl_cert_reqs 1 and 2 need ssl_ca_certs, the authorities of clients; give them")
        return self
