"""Clients of `sametoken chat`: the engine of this process and a sametoken server; both yield the same kind of text."""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sametoken.errors import SametokenError
from sametoken.options.sampling import RequestSpeculation, SamplingParams

if TYPE_CHECKING:
    from sametoken.engine.llm import LLM

SILENCE_S = 600.0  # seconds without a byte from a server after which the request fails
Turn = dict[str, str]  # role and content


class ColouredText(NamedTuple):
    """Text that one forward added to an answer.

    Attributes:
        runs: parts of the text with one origin each, and True for drafted ones.
        figures: tokens and speed of the answer so far, in words.
    """

    runs: list[tuple[str, bool]]
    figures: str

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.runs)


@dataclass
class ChatSettings:
    """Settings of answers.

    Attributes:
        sampled: sampling parameters by name.
        plain: True for answers without drafts.
    """

    sampled: dict[str, Any]
    plain: bool

    def sampling(self, recommended: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters of the engine: the settings, then the model's recommendations.

        Raises:
            RequestError: a value is refused.
        """
        speculative = RequestSpeculation(enabled=not self.plain)
        return SamplingParams(**{**recommended, **self.sampled}, speculative=speculative)


class ChatClient(Protocol):
    """Source of answers to conversations."""

    def answer(self, turns: Sequence[Turn], settings: ChatSettings) -> AsyncIterator[ColouredText]:
        """Pieces of the next turn; closing the iterator ends the answer."""
        ...

    async def close(self) -> None: ...


class EngineClient:
    """Client of an engine in this process, which has its own thread, so that an answer can end between two steps."""

    def __init__(self, llm: LLM) -> None:
        from sametoken.engine.async_llm import AsyncLLM

        self._llm, self._engine = llm, AsyncLLM(llm)

    async def answer(self, turns: Sequence[Turn], settings: ChatSettings) -> AsyncGenerator[ColouredText, None]:
        prompt = self._llm.render_chat(turns)
        printer = TokenPrinter()
        async for chunk in self._engine.stream(prompt, settings.sampling(self._llm.default_sampling)):
            spelled = [self._llm.tokenizer.token_bytes(token) for token in chunk.token_ids]
            yield printer.add(chunk.text, spelled, chunk.origins)

    async def close(self) -> None:
        await self._engine.close()


class ServerClient:
    """Client of a sametoken server.

    Args:
        url: address of the server, with or without /v1.
        api_key: API key, or None if the server has no keys.
        model: name of the model, or None for the server's default.

    Raises:
        ConfigError: the text is no URL, or httpx is not installed.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        from sametoken.client.client import Client

        self._client, self._model, self._url = Client(url, api_key, SILENCE_S), model, url

    async def answer(self, turns: Sequence[Turn], settings: ChatSettings) -> AsyncGenerator[ColouredText, None]:
        from sametoken.client.client import RemoteError

        body = {"messages": list(turns), **settings.sampled}
        body |= {"speculative": {"enabled": not settings.plain, "report": True}}
        body |= {} if self._model is None else {"model": self._model}
        printer = TokenPrinter()
        try:
            async with aclosing(self._client.stream("chat/completions", body)) as deltas:
                async for delta in deltas:
                    report = delta.choice.get("speculative", {"tokens": [], "origins": []})
                    spelled = [raw(token) for token in report["tokens"]]
                    drafted = [origin == "drafted" for origin in report["origins"]]
                    yield printer.add(delta.content, spelled, drafted)
        except RemoteError as error:
            advice = "" if error.status else "; is the server running?"
            raise SametokenError(f"{self._url}: {error}{advice}") from error

    async def close(self) -> None:
        await self._client.close()


def raw(spelled: str) -> bytes:
    """Bytes of a token from its text in a report; a part of a character is written as "bytes:\\xe2\\x82"."""
    digits = spelled.removeprefix("bytes:").split("\\x")
    if spelled.startswith("bytes:\\x") and all(len(each) == 2 for each in digits[1:]):
        return bytes.fromhex("".join(digits))
    return spelled.encode()


@dataclass
class TokenPrinter:
    """Assigns origins to the text of an answer, from its tokens; the text may come later than its tokens.

    If tokens are not part of the text, such as a mark inside an answer, origins may be shifted; the text is always
    exact.
    """

    _started: float = field(default_factory=time.perf_counter)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _waiting: deque[bool] = field(default_factory=deque)  # origins of characters that have not come as text yet
    _begun: bool = False
    _tokens: int = 0
    _forwards: int = 0

    def add(self, text: str, tokens: Sequence[bytes], origins: Sequence[bool]) -> ColouredText:
        """Add the tokens of one forward and return its text, in runs by origin."""
        for token, drafted in zip(tokens, origins, strict=True):
            spelled = self._decoder.decode(token)
            if not self._begun and not text.startswith(" "):
                spelled = spelled.removeprefix(" ")  # the text of an answer begins without this space
            self._begun = True
            self._waiting.extend([drafted] * len(spelled))
        self._tokens += len(tokens)
        self._forwards += bool(tokens)
        signs = [(sign, self._waiting.popleft() if self._waiting else False) for sign in text]
        return ColouredText(_joined(signs), self._figures())

    def _figures(self) -> str:
        seconds = time.perf_counter() - self._started
        length = self._tokens / self._forwards if self._forwards else 0.0
        return f"{self._tokens} tokens, {self._tokens / seconds:.1f} tokens/s, acceptance length {length:.2f}"


def _joined(signs: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Runs of consecutive characters with one origin."""
    runs: list[tuple[str, bool]] = []
    for sign, drafted in signs:
        if runs and runs[-1][1] == drafted:
            runs[-1] = runs[-1][0] + sign, drafted
        else:
            runs.append((sign, drafted))
    return runs
