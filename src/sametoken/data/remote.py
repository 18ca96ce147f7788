"""A server that speaks OpenAI's protocol: its client, repeated attempts, the models it lists, its errors."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sametoken.errors import ConfigError

if TYPE_CHECKING:
    import httpx

LONGEST_WAIT = 60.0  # seconds between two attempts
PASSING = (408, 409, 425, 429)
T = TypeVar("T")


class PassingError(Exception):
    """An attempt failed for a reason that may pass; after `retry_after` seconds, says the server."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


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
            "asking a server needs httpx, which is not installed; run: pip install 'sametoken[server]'"
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


async def persist(ask: Callable[[], Awaitable[T]], retries: int, first_wait: float = 1.0) -> T:
    """What `ask` returns, asked again while it fails for a passing reason.

    Args:
        retries: further attempts after the first.
        first_wait: seconds before the second attempt; doubled for each further one, less up to half by chance, so that
            callers do not come back all at once.

    Raises:
        PassingError: of the last attempt.
    """
    for attempt in range(retries):
        try:
            return await ask()
        except PassingError as error:
            wait = min(LONGEST_WAIT, first_wait * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(error.retry_after, wait))
    return await ask()


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    """The response to a POST, whatever its status, unless the request may succeed later.

    Raises:
        PassingError: the connection was lost, or the server is busy or broken.
    """
    return await _passed(client.post(path, json=body))


async def first_model(client: httpx.AsyncClient, retries: int = 0) -> str:
    """The first model that the server lists.

    Args:
        retries: further attempts while the server is not up or busy.

    Raises:
        ConfigError: it cannot be reached or lists none.
    """
    where = f"{client.base_url}models"
    try:
        response = await persist(lambda: _passed(client.get("models")), retries)
    except PassingError as error:
        raise ConfigError(f"{where}: {error}; expected a running OpenAI-compatible server") from error
    if response.status_code != 200:
        reason = f"HTTP {response.status_code}: {error_words(response.content)}"
        raise ConfigError(f"{where}: {reason}; check --url and --api-key")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{where} lists no model; give its name as MODEL") from error


async def _passed(coming: Awaitable[httpx.Response]) -> httpx.Response:
    import httpx

    try:
        response = await coming
    except httpx.HTTPError as error:
        raise PassingError(f"connection lost ({type(error).__name__})") from error
    if (status := response.status_code) in PASSING or status >= 500:
        reason = f"HTTP {status}: {error_words(response.content)}"
        raise PassingError(reason, _seconds(response.headers.get("retry-after")))
    return response


def _seconds(header: str | None) -> float:
    """What Retry-After asks for, 0 where it is a date or nothing."""
    return min(float(header), LONGEST_WAIT) if header is not None and header.isascii() and header.isdigit() else 0.0


def error_words(content: bytes) -> str:
    """What a body says about an error, short enough to be a reason."""
    try:
        return error_message(json.loads(content))
    except (ValueError, AttributeError):
        return content[:80].decode("utf-8", "replace")


def error_message(event: dict[str, Any]) -> str:
    error = event.get("error", event.get("message", event))
    return str(error.get("message", error) if isinstance(error, dict) else error)[:120]
