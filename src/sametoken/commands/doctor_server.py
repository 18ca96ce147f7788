"""`sametoken doctor --url URL`: report of speculation on a running server, from two scrapes of its metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from os import environ
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sametoken.commands.options import Option, Values, titled
from sametoken.errors import ConfigError

if TYPE_CHECKING:
    from sametoken.check.remote import ServerFindings
    from sametoken.check.scrapes import Scrape
    from sametoken.client.client import Client

OPTIONS = titled(
    "A running server",
    Option("url", str, None, "address of a running server of sametoken, vLLM or SGLang, whose metrics are read."),
    Option("api_key", str, None, "key of the server; without it: the environment's OPENAI_API_KEY."),
    Option(
        "seconds", Annotated[float, Field(gt=0)], 10.0, "number of seconds between the two readings of its metrics."
    ),
)
SILENCE_S = 15.0  # seconds without a byte from the server after which it counts as unreachable


def print_server(values: Values) -> int:
    """Print a report that states if speculation pays on a server, and the reasons."""
    from sametoken.check.remote import report

    key = values["api_key"] or environ.get("OPENAI_API_KEY")
    found = asyncio.run(_find(values["url"], key, values["seconds"]))
    print(json.dumps(found.to_json()) if values["json"] else report(found))
    return 0


async def _find(url: str, key: str | None, seconds: float) -> ServerFindings:
    from sametoken.check.remote import examine
    from sametoken.client.client import Client

    async with Client(url, key, SILENCE_S) as client:
        first = await _metrics(client)
        about = await _about(client, first)
        await asyncio.sleep(seconds)
        return examine(first, await _metrics(client), seconds, about)


async def _metrics(client: Client) -> Scrape:
    """Scrape of the server's metrics; without samples for an SGLang server that exports no metrics.

    Raises:
        ConfigError: the server cannot be reached, or requires a key.
        SametokenError: the server has no known metrics.
    """
    from sametoken.check.scrapes import SERVERS, Scrape, read
    from sametoken.client.client import RemoteError

    try:
        return read((await client.page("metrics")).decode(errors="replace"))
    except RemoteError as error:
        if error.status == 404 and await _sglang(client):
            return Scrape(SERVERS[-1], {})
        advice = "check --api-key" if error.status in (401, 403) else "expected a running server with metrics"
        if error.status == 404:
            advice = "SGLang needs --enable-metrics; TensorRT-LLM and others are not read"
        raise ConfigError(f"{client.beside('metrics')}: {error}; {advice}") from error


async def _about(client: Client, scrape: Scrape) -> Mapping[str, Any]:
    """Properties of the server, read from its endpoints, in the form that `examine` takes."""
    name = scrape.names.server
    about: dict[str, Any] = {"model": await client.first_model()}
    if name == "sametoken":
        info = await _json(client, "server_info")
        speculative, offers = _object(info, "speculative"), _object(info, "offers")
        method = offers.get("method")
        about |= {"method": None if method == "none" else method, "adaptive": speculative.get("adaptive", True)}
        about["version"] = (await _json(client, "version")).get("version")
    elif name == "vLLM":
        about["version"] = (await _json(client, "version")).get("version")
        if "spec_decode_num_drafts_total" in scrape.samples:
            about["method"] = "speculative decoding"
    else:
        about |= await _sglang(client)
    return about


async def _sglang(client: Client) -> dict[str, Any]:
    """Properties of an SGLang server, read from its endpoints; {} for any other server."""
    reply = await _json(client, "get_server_info") or await _json(client, "server_info")
    if "speculative_algorithm" not in reply:
        return {}
    stated = reply.get("internal_states")
    states = [state for state in stated if isinstance(state, dict)] if isinstance(stated, list) else []
    lengths = [length for state in states if (length := _number(state, "avg_spec_accept_length"))]
    return {
        "version": reply.get("version"),
        "method": reply["speculative_algorithm"],
        "draft_len": max(0.0, _number(reply, "speculative_num_draft_tokens") - 1),
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
    }


def _object(reply: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Object under a key of a server's reply; {} if the value is not an object."""
    found = reply.get(key)
    return found if isinstance(found, dict) else {}


def _number(reply: Mapping[str, Any], key: str) -> float:
    """Number under a key of a server's reply; 0 if the value is not a finite number."""
    found = reply.get(key)
    return float(found) if isinstance(found, int | float) and isfinite(found) else 0.0


async def _json(client: Client, path: str) -> dict[str, Any]:
    """JSON object at a path of the server; {} if there is none, because not all servers have all paths."""
    from sametoken.client.client import RemoteError

    with suppress(RemoteError, ValueError, RecursionError):
        reply = json.loads(await client.page(path))
        return reply if isinstance(reply, dict) else {}
    return {}
