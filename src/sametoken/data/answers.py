"""Answers to prompts, from the engine in this process or from an OpenAI-compatible server.

Both return one answer to one prompt; the caller decides on the number of concurrent prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sametoken.client.client import Answer, Client, RemoteError
from sametoken.errors import ConfigError, RequestError, SametokenError
from sametoken.options.sampling import SamplingParams
from sametoken.prompts.sources import Conversation, Source, encode_prompt

if TYPE_CHECKING:
    from sametoken.engine.async_llm import AsyncLLM

UNUSABLE = (401, 403, 404, 405, 410)  # statuses for a wrong key, model or address, which fail every request


class AnswerSampling(NamedTuple):
    """Sampling of answers of at most `max_tokens`; temperature 0 is greedy; None for the model's default."""

    temperature: float | None
    top_p: float | None
    max_tokens: int

    @property
    def given(self) -> dict[str, Any]:
        """Names and values of the parameters that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class NoAnswerError(SametokenError):
    """Error: a prompt got no answer; `lasting` if retries are useless."""

    def __init__(self, reason: str, lasting: bool) -> None:
        super().__init__(reason)
        self.lasting = lasting


class Answerer(Protocol):
    """Source of answers to prompts, for any number of concurrent calls."""

    async def answer(self, prompt: Source, seed: int) -> Answer:
        """Answer to a prompt.

        Raises:
            NoAnswerError: this prompt has no answer.
            SametokenError: no prompt will have an answer.
        """


class EngineAnswers:
    """Answers of the engine in this process, which batches concurrent prompts."""

    def __init__(self, engine: AsyncLLM, sampling: AnswerSampling) -> None:
        self._engine, self._sampling = engine, sampling

    async def answer(self, prompt: Source, seed: int) -> Answer:
        params = SamplingParams(**{**self._engine.llm.default_sampling, **self._sampling.given}, seed=seed)
        try:
            (done,) = await self._engine.generate([encode_prompt(self._engine.llm.tokenizer, prompt).ids], params)
        except RequestError as error:
            raise NoAnswerError(str(error), lasting=True) from error
        if done.error is not None:
            raise NoAnswerError(str(done.error), lasting=True)
        return Answer({"role": "assistant", "content": done.text}, done.finish_reason, len(done.token_ids))


class ServerAnswers:
    """Answers of an OpenAI-compatible server.

    Args:
        model: name of the model on the server.
        retries: further attempts after a temporary failure.
        first_wait: seconds before the second attempt; doubled for each further one, minus a random part of up to half.
    """

    def __init__(
        self, client: Client, model: str, sampling: AnswerSampling, retries: int, first_wait: float = 1.0
    ) -> None:
        self._client, self._retries, self._first_wait = client, retries, first_wait
        self._sampling = sampling
        self._fixed = {"model": model, **sampling.given, "stream": False}

    async def answer(self, prompt: Source, seed: int) -> Answer:
        chat = isinstance(prompt, Conversation)
        said = {"messages": [*prompt.messages]} if isinstance(prompt, Conversation) else {"prompt": prompt}
        body = {**self._fixed, **said, **({} if self._sampling.temperature == 0 else {"seed": seed})}
        path = "chat/completions" if chat else "completions"
        try:
            return await self._client.answer(path, body, self._retries, self._first_wait)
        except RemoteError as error:
            if error.passing:
                raise NoAnswerError(f"{error} (attempt {self._retries + 1}, the last)", lasting=False) from error
            if error.status in UNUSABLE or (error.status or 0) < 400:
                where = self._client.where(path)
                raise ConfigError(f"{where}: {error}; check --url, --api-key and --model") from error
            raise NoAnswerError(str(error), lasting=True) from error
