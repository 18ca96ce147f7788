"""The options of the HTTP server around an engine."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sametoken.options.declaration import Names, Settings, Shown


def _path(given: str) -> str:
    path = given.rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("expected a path, for example /llm, of letters, digits and ._~-")
    return path


def _collector(given: str) -> str:
    if not re.match(r"https?://[^/]", given):
        raise ValueError("expected an http:// or https:// URL of OTLP over HTTP, for example http://localhost:4318")
    return given


RootPath = Annotated[str, AfterValidator(_path)]
Collector = Annotated[str, AfterValidator(_collector)]
MOST_REPLICAS = 64


class ServerConfig(Settings):
    """The HTTP server around an engine."""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 is every interface of this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """port to listen on; 0 takes a free one."""
    data_parallel_size: Annotated[int, Field(ge=1, le=MOST_REPLICAS), Shown(("--dp", "-dp", "--dp-size"))] = 1
    """engines of the model behind the port, each a process with its share of the threads and of the memory for the KV
    cache, on CUDA with a GPU of its own. A request goes to the one that has most of its prompt in the cache, unless
    that one is busier."""
    api_key: Names = ()
    """a key that clients must send as a bearer token, repeatable; none lets everyone in. SAMETOKEN_API_KEY holds
    more, separated by commas."""
    served_model_name: Names = ()
    """what clients call the model, repeatable, the first is the one in replies; none is MODEL."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """sequences that may wait for a place in the batch; a request beyond them is answered with 429."""
    request_timeout: Annotated[float, Field(gt=0)] | None = None
    """seconds after which a request is given up; without it: never."""
    max_body: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """bytes of a request's body at most."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """how long open requests may go on after SIGTERM, SIGHUP or the first SIGINT."""
    max_chunks_per_second: Annotated[float, Field(gt=0)] = 500.0
    """chunks that all streams together get at most: of a busy server a chunk then has the tokens of several steps,
    held for at most 0.05 s; a stream's first never waits."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "deepseek-r1", "openai_gptoss"] = "auto"
    """how the model marks what it thinks before it speaks, which replies then have apart; "auto" finds it by the
    marks in the chat template, "none" leaves it in the text."""
    cors_origin: Names = ()
    """web origins whose pages may call this server, repeatable; "*" is every one, none is off."""
    keep_alive: Annotated[float, Field(ge=0)] = 75.0
    """seconds that a connection without a request stays open; more than a proxy before it keeps one, which may
    otherwise send into a connection that closes."""
    root_path: RootPath = ""
    """path below which a proxy offers this server, for the pages and the OpenAPI document; requests may come with it
    or without."""
    ssl_certfile: str | None = None
    """certificate of the server, in PEM, with its chain; with one the server speaks HTTPS."""
    ssl_keyfile: str | None = None
    """its key; without it: in the certificate's file."""
    ssl_ca_certs: str | None = None
    """authorities in PEM that a client's certificate must come from."""
    ssl_cert_reqs: Annotated[int, Field(ge=0, le=2)] = 0
    """whether clients need a certificate: 0 no, 1 it is checked if there is one, 2 yes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """the least important messages that are logged."""
    log_format: Literal["text", "json"] = "text"
    """lines as text, or each as a JSON object."""
    access_log: bool = True
    """log a line per request; probes that went well are at level debug."""
    otlp_traces_endpoint: Collector | None = None
    """URL of a collector that is sent a trace of every request by OTLP over HTTP, for example http://localhost:4318;
    without it: off. Needs the extra `otel`."""

    @model_validator(mode="after")
    def _certificates(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs go with ssl_certfile; give it too")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("ssl_cert_reqs 1 and 2 need ssl_ca_certs, the authorities of clients; give them")
        return self
