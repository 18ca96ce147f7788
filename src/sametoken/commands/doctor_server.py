"""`sametoken doctor --url URL`: asks a running server twice for its metrics, and says whether its speculation pays."""

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
SILENCE_S = 15.0  # after which a server that says nothing is taken to be gone


def tell_server(values: Values) -> int:
    """Print whether speculation pays on a server, and why."""
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
    """A scrape; of an SGLang server that exports none, one without samples.

    Raises:
        ConfigError: the server cannot be reached, or wants a key.
        SametokenError: it has no metrics that are known.
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
        said = await _json(client, "server_info")
        speculative, offers = _object(said, "speculative"), _object(said, "offers")
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
    """Properties of an SGLang server, read from its endpoints; {} where the server is another."""
    said = await _json(client, "get_server_info") or await _json(client, "server_info")
    if "speculative_algorithm" not in said:
        return {}
    stated = said.get("internal_states")
    states = [state for state in stated if isinstance(state, dict)] if isinstance(stated, list) else []
    lengths = [length for state in states if (length := _number(state, "avg_spec_accept_length"))]
    return {
        "version": said.get("version"),
        "method": said["speculative_algorithm"],
        "draft_len": max(0.0, _number(said, "speculative_num_draft_tokens") - 1),
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
    }


def _object(said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object in what a server said, {} where it said something else."""
    found = said.get(key)
    return found if isinstance(found, dict) else {}


def _number(said: Mapping[str, Any], key: str) -> float:
    """A number in what a server said, 0 where it said something else."""
    found = said.get(key)
    return float(found) if isinstance(found, int | float) and isfinite(found) else 0.0


async def _json(client: Client, path: str) -> dict[str, Any]:
    """The JSON object of a page, {} where there is none: servers differ in which pages they have."""
    from sametoken.client.client import RemoteError

    with suppress(RemoteError, ValueError, RecursionError):
        said = json.loads(await client.page(path))
        return said if isinstance(said, dict) else {}
    return {}
