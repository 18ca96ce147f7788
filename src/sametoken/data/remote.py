"""A server that speaks OpenAI's protocol: a client of it, the models it lists, what it says about an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sametoken.errors import ConfigError

if TYPE_CHECKING:
    import httpx


def open_client(url: str, api_key: str | None, timeout: float) -> httpx.AsyncClient:
    """A client of the server at `url`, which may or may not end with /v1.

    Args:
        timeout: seconds without a byte after which a request has failed.

    Raises:
        ConfigError: httpx is not there, or the URL is none.
    """
    try:
        import httpx
    except ImportError:
        raise ConfigError(
            "asking a server needs httpx; it is not there: pip install 'sametoken[bench]' or 'sametoken[train]'"
        ) from None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: expected a URL such as http://localhost:8000")
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        secure = base.startswith("https://")  # else certificates, 0.2 s to read, have no use
        return httpx.AsyncClient(
            base_url=base, headers=headers, timeout=httpx.Timeout(timeout), limits=limits, verify=secure
        )
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise ConfigError(f"--url {url!r}: {error}; expected a URL such as http://localhost:8000") from error


async def first_model(client: httpx.AsyncClient) -> str:
    """The first model that the server lists.

    Raises:
        ConfigError: it cannot be reached or lists none.
    """
    import httpx

    try:
        response = await client.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ConfigError(
            f"{client.base_url}models: {error or type(error).__name__}; expected a running OpenAI-compatible server"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{client.base_url}models lists no model; give its name as MODEL") from error


def error_words(content: bytes) -> str:
    """What a body says about an error, short enough to be a reason."""
    try:
        return error_message(json.loads(content))
    except (ValueError, AttributeError):
        return content[:80].decode("utf-8", "replace")


def error_message(event: dict[str, Any]) -> str:
    error = event.get("error", event.get("message", event))
    return str(error.get("message", error) if isinstance(error, dict) else error)[:120]
