"""Client of an OpenAI-compatible server: complete and streamed answers, retries, one type of error.

`bench`, `synthesize` and `chat` use it. Events of a stream have the time at which their bytes arrived.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sametoken.client.events import EventParser
from sametoken.errors import ConfigError, SametokenError

if TYPE_CHECKING:
    import httpx

LAST_PORT = 65_535
LONGEST_WAIT = 60.0  # seconds between two attempts
RETRIED = (408, 409, 425, 429)  # and every status from 500
END_OF_STREAM = "[DONE]"
MALFORMED = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
)  # UnicodeError is a ValueError
T = TypeVar("T")


class RemoteError(SametokenError):
    """Error of a failed request.

    Attributes:
        status: HTTP status, None if there was none.
        passing: true if the same request may succeed later.
        retry_after: seconds until then, if the server states them.
    """

    def __init__(self, reason: str, status: int | None = None, passing: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.passing, self.retry_after = status, passing, retry_after


class Answer(NamedTuple):
    """Complete answer.

    Attributes:
        message: the assistant's turn: role, content and, if the server separates it, reasoning_content.
        finish_reason: finish reason that the server stated.
        tokens: number of tokens of the answer, 0 if the server does not state it.
        body: body of the response, for extensions.
    """

    message: dict[str, str]
    finish_reason: str | None
    tokens: int
    body: Mapping[str, Any] = MappingProxyType({})

    @property
    def truncated(self) -> bool:
        """True if the answer was cut at the length limit."""
        return self.finish_reason == "length"


class Delta(NamedTuple):
    """Event of a streamed answer.

    Attributes:
        at: arrival time of its last byte, on the clock of `time.perf_counter`.
        content, reasoning: text that the event adds.
        tokens: number of tokens of the answer so far, by the server's count; None if the event has none.
        choice: first choice of the event, for extensions.
    """

    at: float
    content: str
    reasoning: str
    tokens: int | None
    choice: Mapping[str, Any]


class Client:
    """Client of one server; close it, or use it as an asynchronous context manager.

    Args:
        url: address of the server, with or without /v1.
        api_key: key, None for a server without keys.
        timeout: seconds without a byte after which a request has failed.

    Raises:
        ConfigError: httpx is not installed, or the URL is invalid.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
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
            secure = base.startswith("https://")  # otherwise certificates, which take 0.2 s to read, are not needed
            self._http = httpx.AsyncClient(
                base_url=base, headers=headers, timeout=httpx.Timeout(timeout), limits=limits, verify=secure
            )
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise ConfigError(f"--url {url!r}: {error}; expected a URL such as http://localhost:8000") from error
        if (port := self._http.base_url.port or 0) > LAST_PORT:
            raise ConfigError(f"--url {url!r}: got port {port}, expected at most {LAST_PORT}")

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    def where(self, path: str) -> str:
        """Address of a path below /v1, for messages."""
        return f"{self._http.base_url}{path}"

    def beside(self, path: str) -> str:
        """Address of a path that is not below /v1, for example "metrics"."""
        return str(self._http.base_url).removesuffix("v1/") + path

    async def page(self, path: str) -> bytes:
        """Content of a path that is not below /v1 (GET). Raises RemoteError if the request fails."""
        return (await self._whole("GET", self.beside(path))).content

    async def first_model(self, retries: int = 0) -> str:
        """Name of the first model that the server lists.

        Args:
            retries: further attempts while the server is not up or busy.

        Raises:
            ConfigError: the server cannot be reached or lists no model.
        """
        where = self.where("models")
        try:
            response = await persist(lambda: self._whole("GET", "models"), retries)
            return str(response.json()["data"][0]["id"])
        except RemoteError as error:
            advice = "expected a running OpenAI-compatible server" if error.passing else "check --url and --api-key"
            raise ConfigError(f"{where}: {error}; {advice}") from error
        except MALFORMED as error:
            raise ConfigError(f"{where} lists no model; give its name as MODEL") from error

    async def answer(self, path: str, body: Mapping[str, Any], retries: int = 0, first_wait: float = 1.0) -> Answer:
        """Send a request, with retries after temporary failures (see `persist`), and return the complete answer.

        Args:
            path: "chat/completions" or "completions".

        Raises:
            RemoteError: the last attempt failed.
        """

        async def ask() -> Answer:
            response = await self._whole("POST", path, body)
            try:
                return _reply(response.json())
            except MALFORMED as error:
                reason = f"not an OpenAI answer ({type(error).__name__}): {_words(response.content)}"
                raise RemoteError(reason, response.status_code, passing=True) from error

        return await persist(ask, retries, first_wait)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Delta, None]:
        """Yield the events of a streamed answer as they arrive. Close the generator to stop the answer.

        Raises:
            RemoteError: there is no answer, it is incomplete, or it is not a stream in OpenAI's format.
        """
        done = False
        async with self._open("POST", path, {**body, "stream": True}) as response:
            async for at, data in _events(response.aiter_bytes()):
                if data.strip() == END_OF_STREAM:
                    done = True
                    continue
                with _malformed_is("not an OpenAI stream"):
                    delta = _delta(at, json.loads(data))
                done = done or bool(delta.choice.get("finish_reason"))  # some servers omit the final [DONE]
                yield delta
        if not done:
            raise RemoteError("stream ended early", passing=True)

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """Response with status 200, completely read."""
        async with self._open(method, path, body) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx.Response]:
        """Response with status 200, its body not read yet.

        Raises:
            RemoteError: another status, or the connection is lost, also within the block.
        """
        import httpx

        try:
            async with self._http.stream(method, path, json=body) as response:
                if (status := response.status_code) != 200:
                    passing = status in RETRIED or status >= 500
                    wait = _seconds(response.headers.get("retry-after"))
                    raise RemoteError(f"HTTP {status}: {_words(await response.aread())}", status, passing, wait)
                yield response
        except httpx.HTTPError as error:
            what = "stalled" if isinstance(error, httpx.TimeoutException) else "connection lost"
            raise RemoteError(f"{what} ({type(error).__name__})", passing=True) from error


async def all_together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently. The first failure cancels the others; its error is raised after they have ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def persist(ask: Callable[[], Awaitable[T]], retries: int, first_wait: float = 1.0) -> T:
    """Call `ask` and return its result, with retries after temporary failures.

    Args:
        retries: further attempts after the first.
        first_wait: seconds before the second attempt; doubled for each further one, minus a random part of up to half,
            so that callers do not retry at the same time.

    Raises:
        RemoteError: error of the last attempt, or the first permanent one.
    """
    for attempt in range(retries):
        try:
            return await ask()
        except RemoteError as error:
            if not error.passing:
                raise
            wait = min(LONGEST_WAIT, first_wait * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(error.retry_after, wait))
    return await ask()


@contextmanager
def _malformed_is(what: str) -> Iterator[None]:
    try:
        yield
    except MALFORMED as error:
        raise RemoteError(f"{what} ({type(error).__name__})") from error


async def _events(received: AsyncIterator[bytes]) -> AsyncGenerator[tuple[float, str], None]:
    """Yield the data of each event, with the arrival time of its last bytes."""
    parser = EventParser()
    async for part in received:
        at = time.perf_counter()
        with _malformed_is("not an OpenAI stream"):
            found = parser.feed(part)
        for data in found:
            yield at, data
    with _malformed_is("not an OpenAI stream"):
        found = parser.close()
    for data in found:
        yield time.perf_counter(), data


def _delta(at: float, event: dict[str, Any]) -> Delta:
    if event.get("error"):
        raise RemoteError(f"error in the stream: {_message(event)}")
    counted = (event.get("usage") or {}).get("completion_tokens")
    choice = (event.get("choices") or [{}])[0]
    added = choice.get("delta") or {}
    content = choice.get("text") or added.get("content") or ""
    return Delta(at, content, added.get("reasoning_content") or "", None if counted is None else int(counted), choice)


def _reply(content: dict[str, Any]) -> Answer:
    choice = content["choices"][0]
    said = choice["message"] if "message" in choice else {"content": choice["text"]}
    message = {"role": "assistant", "content": said.get("content") or ""}
    if reasoning := said.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    "".join(message.values()).encode()  # a lone surrogate cannot be written to a file
    tokens = int((content.get("usage") or {}).get("completion_tokens") or 0)
    return Answer(message, choice.get("finish_reason"), tokens, content)


def _seconds(header: str | None) -> float:
    """Seconds in a Retry-After header, 0 for a date or none."""
    return min(float(header), LONGEST_WAIT) if header is not None and header.isascii() and header.isdigit() else 0.0


def _words(content: bytes) -> str:
    """Error text from a body, short enough for a reason."""
    try:
        return _message(json.loads(content))
    except (ValueError, AttributeError):
        return content[:80].decode("utf-8", "replace")


def _message(event: dict[str, Any]) -> str:
    error = event.get("error", event.get("message", event))
    return str(error.get("message", error) if isinstance(error, dict) else error)[:120]
