"""`LLM`: prompts in, completions out. Loads the models and steps the engine for callers in any thread."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from threading import RLock
from typing import Any, Self, Unpack

import torch

from sametoken.checkpoint.chat import Message, is_list
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.dialects.keywords import Keywords, read_keywords
from sametoken.engine.build import build_engine, default_method, with_length
from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.engine import Engine
from sametoken.engine.llm_requests import Parsed, Prompt, RequestMaker, several
from sametoken.engine.load import load_models
from sametoken.engine.progress import counted
from sametoken.engine.report import StepReport
from sametoken.engine.request import Emission, Request
from sametoken.errors import NO_WINDOWS, ConfigError, EngineError, RequestError, shown
from sametoken.kernels.cpu.variant import status
from sametoken.options.engine import MOST_THREADS, EngineConfig, KVCacheConfig, Options
from sametoken.options.sampling import SamplingParams
from sametoken.options.serving import CACHE
from sametoken.options.speculation import SpeculativeConfig
from sametoken.parallel.follow import join

LOG = logging.getLogger("sametoken")
PASS_ON_S = 5e-5  # seconds of sleep after a thread's turn, in which a waiting thread takes the next turn


class LLM:
    """A target model, optionally with a draft, ready to generate.

    Requests of several threads run together.

    The output is a function of target, prompt, sampling parameters and seed alone: no draft, no batch and no chunking
    of the prompt changes a token.

    Args:
        model: directory, Hub id, "embedded" for the target that comes with the package, or "smollm2" for a published
            one, which is downloaded once.
        draft: directory or Hub id of a draft model or of an EAGLE or Medusa head, or output directory of a
            training run; "embedded" for the draft of the embedded target, "embedded-eagle3" for its head.
        speculative: `SpeculativeConfig` or a mapping of its keys.
        kv_cache: `KVCacheConfig` or a mapping of its keys.
        revision: branch, tag or commit of the model on the Hub.
        draft_revision: branch, tag or commit of the draft.
        threads: number of compute threads of this process, for all its engines together; None leaves it unchanged.
        engine: keys of `EngineConfig` (dtype, device, max_batch_size, max_num_tokens, max_seq_len, ...), and of
            `KVCacheConfig` as written on the command line: kv_cache_dtype, ... vLLM's keywords (max_model_len,
            max_num_seqs, gpu_memory_utilization, speculative_config, ...) are those of `sametoken vllm serve`.

    As a context manager, the object is closed at the end, which frees its memory.

    Attributes:
        ranks: other processes that compute the target; None for none. In a process that mpirun, torchrun or srun
            started as a rank other than 0, the constructor computes for rank 0 and does not return.

    Raises:
        SametokenError: the models cannot be loaded, do not fit each other or the memory.
    """

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        *,
        kv_cache: KVCacheConfig | Mapping[str, Any] | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        threads: int | None = None,
        **engine: Unpack[Options],
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError(NO_WINDOWS)
        asked = read_keywords(engine)
        given = asked.engine
        draft, draft_revision = _models(asked, draft=draft, draft_revision=draft_revision)
        if speculative is not None and asked.speculative:
            raise ConfigError("speculative and speculative_config are the same setting; give one of them")
        os.environ.update(asked.env)
        for note in asked.notes:
            LOG.warning("%s", note)
        cache = _cache_config(kv_cache, {name: given.pop(name) for name in list(given) if name.startswith(CACHE)})
        config = EngineConfig(**given)
        if threads is not None:
            if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
                raise ConfigError(f"threads is {threads!r}, expected 1 to {MOST_THREADS}; leave it out for all cores")
            torch.set_num_threads(threads)
        join(os.environ, config.tensor_parallel_size)
        self.speculative = SpeculativeConfig.of(asked.speculative or speculative)
        loaded = load_models(model, draft, (revision, draft_revision), config, self.speculative)
        self.method = default_method(self.speculative, loaded.draft, loaded.target.embed.device)
        self.speculative = with_length(self.speculative, self.method)
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.config = loaded.target.config
        self.default_sampling: Mapping[str, Any] = loaded.sampling
        self.pooling, self.ranks, self._places = loaded.pooling, loaded.ranks, loaded.places
        stretch = () if config.rope_scaling is None else (sorted(config.rope_scaling.items()),)
        self._formats = (config.quantization, config.draft_quantization, cache.dtype, cache.tokens_per_block, *stretch)
        self.engine: Engine
        self.engine, context = build_engine(loaded, self.speculative, config, cache)
        self.max_seq_len = context.length
        self._maker = RequestMaker(
            self.engine, self.tokenizer, self.config.vocab_size, self.speculative, self.method, context
        )
        self._turn = RLock()  # held by the thread that steps the engine
        self._waiting = set[object]()  # threads that wait for this lock
        self._named = model if draft is None else f"{model}, draft={draft}"

    def __repr__(self) -> str:
        if not hasattr(self, "engine"):
            return f"LLM({self._named}, closed)"
        decoder, most = self.engine.runner.decoder, self.engine.max_batch_size
        dtype, device = str(decoder.dtype).removeprefix("torch."), self.engine.table.table.device
        return (
            f"LLM({self._named}, method={self.method}, {dtype} on {device}, max_batch_size={most}, "
            f"max_seq_len={self.max_seq_len})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free models and cache, and end the other ranks; may be called twice. The object cannot be used afterwards."""
        if hasattr(self, "engine"):
            del self.engine, self._maker
            gc.collect()  # the parts of an engine refer to each other
        if self.ranks is not None:
            self.ranks.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Complete prompts together; return n completions for each, in order of the prompts.

        Args:
            prompts: text or token ids, one or several.
            params: parameters of all prompts, or one for each; None for `get_default_sampling_params()`.
            progress: true for a bar of finished completions on standard error, if that is a terminal.
            sampling_params: vLLM's name for `params`.
            use_tqdm: vLLM's name for `progress`.
        """
        requests = self.requests(prompts, sampling_params if params is None else params)
        finished = (emission.finished for emission in self._run(requests))
        for _ in counted(finished, len(requests), "completions") if progress or use_tqdm else finished:
            pass
        return [Completion.of(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Generate the assistant's next turn of one conversation or several; `options` are arguments of `generate`."""
        if not is_list(messages):
            raise RequestError(f"messages is {shown(messages)}, expected a list of messages with role and content")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(chat) for chat in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params, **options)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Prompt ids of a conversation, ready for the assistant's turn."""
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages), add_special_tokens=False)

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of a request without any: those that the model recommends, else the defaults.

        The name is vLLM's.
        """
        return SamplingParams(**self.default_sampling)

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete prompts as `generate`, step by step; closing the iterator cancels unfinished requests."""
        # Closed with this iterator, not when its frame is collected: Python 3.12.3 keeps the frame.
        with closing(self._run(self.requests(prompts, params))) as emissions:
            for emission in emissions:
                yield Chunk.of(emission)

    def _run(self, requests: Sequence[Request]) -> Generator[Emission]:
        """Step the engine until these requests end; yield their emissions in order of the requests."""
        going = {request.id for request in requests}
        got: dict[int, Emission] = {}

        def collect(report: StepReport) -> None:
            """Collect the emissions of these requests; another iterator may step the engine."""
            for emission in report.emissions:
                if (number := emission.request.id) in going:
                    got[number] = got[number].then(emission) if number in got else emission

        engine = self._opened_engine()
        with self._in_turn():
            engine.reports.append(collect)
        try:
            with self._in_turn():
                for request in requests:
                    engine.add(request)
            while going:
                with self._in_turn():
                    self._opened_engine()
                    if not got:
                        engine.step()
                    emissions = [got.pop(number) for number in sorted(got)]  # numbers are in order of the requests
                going -= {emission.request.id for emission in emissions if emission.finished}
                yield from emissions
        finally:
            with self._in_turn():
                engine.reports.remove(collect)
                for number in going:
                    engine.abort(number)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Lock the engine, and afterwards give way to waiting threads.

        Python's locks have no order: a thread that acquires a lock in a loop would exclude all others.
        """
        mine = object()
        self._waiting.add(mine)
        try:
            with self._turn:
                self._waiting.discard(mine)
                yield
        finally:
            self._waiting.discard(mine)
        if self._waiting:
            time.sleep(PASS_ON_S)

    def _opened_engine(self) -> Engine:
        if not hasattr(self, "engine"):
            raise EngineError("this LLM was closed; make a new one")
        return self.engine

    def requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Make checked requests, n per prompt in order of the prompts; they are not in the engine yet."""
        self._opened_engine()
        prompts = several(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * len(prompts)
        if not is_list(params) or not all(isinstance(each, SamplingParams) for each in params):
            raise RequestError(f"params is {shown(params)}, expected SamplingParams or a list, one for each prompt")
        if len(params) != len(prompts):
            raise RequestError(f"got {len(params)} sampling parameters for {len(prompts)} prompts; give one or as many")
        known: dict[int, Parsed] = {}
        pairs = enumerate(zip(prompts, params, strict=True))
        return [made for index, pair in pairs for made in self._maker.make(*pair, index, known)]

    def make_requests(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> list[Request]:
        """Make the n checked requests of one prompt; see `RequestMaker.make`."""
        self._opened_engine()
        return self._maker.make(prompt, params, index)

    def check_length(self, text: str) -> None:
        """Raise PromptTooLongError if a text cannot fit, without tokenising it; see `RequestMaker.check_length`."""
        self._maker.check_length(text)

    def fingerprint(self) -> str:
        """Hash of all that determines the bits of keys and values: models, number formats, kernels, pages."""
        decoder, stretched = self.engine.runner.decoder, self.config.rope.kind == "longrope"
        facts = [*map(model_digest, self._places), self._formats, decoder.dtype, decoder.embed.device.type,
                 status().variant, self.max_seq_len if stretched else 0]  # fmt: skip
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @property
    def methods(self) -> tuple[str, ...]:
        """Drafting methods that any request may choose, without those that depend on the request's content."""
        return self._maker.methods


def _models(asked: Keywords, **stated: str | None) -> Iterator[str | None]:
    """Draft and its revision, from arguments or `speculative_config`; raise ConfigError if both name one."""
    for name, value in stated.items():
        if value is not None and asked.models.get(name) is not None:
            raise ConfigError(f"{name} and speculative_config both name the draft; give one of them")
        yield value if value is not None else asked.models.get(name)


def _cache_config(kv_cache: KVCacheConfig | Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> KVCacheConfig:
    """Cache settings from `kv_cache` and from keywords such as `kv_cache_dtype`."""
    stated = KVCacheConfig.of(kv_cache)
    for name in keywords:
        if (key := name.removeprefix(CACHE)) in stated.model_fields_set:
            raise ConfigError(f"{key!r} of kv_cache and {name} are the same setting; give one of them")
    return KVCacheConfig(**dict(stated) | {name.removeprefix(CACHE): value for name, value in keywords.items()})
