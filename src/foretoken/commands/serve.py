"""`foretoken serve`: an OpenAI-compatible server of one model, with or without a draft."""

from __future__ import annotations

import logging
import os
from typing import Any

from foretoken.commands.models import model_names, open_llm
from foretoken.commands.options import CACHE, Option, Values, engine_options, settings_of, settings_options
from foretoken.config import EngineConfig, KVCacheConfig, ServerConfig, SpeculativeConfig
from foretoken.errors import ConfigError

OPTIONS: tuple[Option, ...] = (*settings_options(ServerConfig), *engine_options())
KEYS_VARIABLE = "FORETOKEN_API_KEY"


def command(model: str | None, values: Values) -> int:
    """Serve a model over HTTP as OpenAI's API does. Drafts change the speed, never a token."""
    server = server_config(values)
    try:
        from foretoken.server.run import bind, serve
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}; it is not there: pip install 'foretoken[server]'") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with bind(server) as bound:
        serve(open_llm(model, values), bound, server, resolved(model, values, server))
    return 0


def server_config(values: Values) -> ServerConfig:
    """The server's settings; keys of the environment come after those of the command line.

    Raises:
        ConfigError: a value is refused.
    """
    chosen = settings_of(ServerConfig, values)
    given = [*(chosen["api_key"] or ()), *filter(None, os.environ.get(KEYS_VARIABLE, "").split(","))]
    if "" in given:
        raise ConfigError("--api-key is empty; expected a key, or leave it out to let everyone in")
    return ServerConfig(**{**chosen, "api_key": given})


def resolved(model: str | None, values: Values, server: ServerConfig) -> dict[str, Any]:
    """The configuration as it came out, without secrets: what /server_info shows."""
    speculative = SpeculativeConfig(**settings_of(SpeculativeConfig, values))
    target, draft = model_names(model, values["draft"], speculative.method)
    keys = {"api_key": len(server.api_key)}
    return {
        "model": target,
        "draft": draft,
        "speculative": speculative.model_dump(mode="json"),
        "engine": EngineConfig(**settings_of(EngineConfig, values)).model_dump(mode="json"),
        "kv_cache": KVCacheConfig(**settings_of(KVCacheConfig, values, CACHE)).model_dump(mode="json"),
        "server": server.model_dump(mode="json") | keys,
    }
