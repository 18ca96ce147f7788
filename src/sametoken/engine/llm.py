"""`LLM`: prompts in, completions out. Checks requests, tokenises, and steps the engine for callers in any thread."""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from threading import RLock
from typing import Any, NamedTuple, Self, Unpack

import torch

from sametoken.checkpoint.chat import Message, is_list
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.drafters.automaton import SuffixAutomaton
from sametoken.drafters.prediction import index_prediction
from sametoken.engine.build import build_engine, default_method, load_models
from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.confined import AfterMark, AllowedTokens, InitialGrammar
from sametoken.engine.detokenize import Detokenizer
from sametoken.engine.engine import Engine
from sametoken.engine.grammar import Grammars
from sametoken.engine.progress import counted
from sametoken.engine.report import StepReport
from sametoken.engine.request import Emission, Request
from sametoken.errors import NO_WINDOWS, ConfigError, EngineError, PromptTooLongError, RequestError, shown
from sametoken.kinds import coming_with
from sametoken.options.engine import MOST_THREADS, EngineConfig, KVCacheConfig
from sametoken.options.keywords import EngineOptions
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.options.serving import CACHE
from sametoken.options.speculation import AUTO, NO_DRAFT, SpeculativeConfig
from sametoken.parallel.follow import join
from sametoken.speculation.noise import choice_seed
from sametoken.speculation.sampling import RowSampling

Prompt = str | Sequence[int]
MOST_CHOICES = 1024
PREDICTION, FORCED = coming_with("prediction"), coming_with("structured_outputs")
MOST_PER_TOKEN = 32  # characters of a text per token, on average


class _Brought(NamedTuple):
    """What comes with parameters and costs time to read; prompts share it."""

    grammar: InitialGrammar | None
    prediction: SuffixAutomaton | None


class LLM:
    """A target model, optionally with a draft, ready to generate.

    Several threads may call it: their requests run together.

    The output is a function of target, prompt, sampling parameters and seed alone: no draft, no batch and no chunking
    of the prompt changes a token.

    Args:
        model: directory, Hub id, or "embedded" for the target that comes with the package.
        draft: the same for a draft model, or for an EAGLE or Medusa head of the target, or the output directory of
            the training run that made it; "embedded" is the embedded target's draft, "embedded-eagle3" its head.
        speculative: `SpeculativeConfig` or a mapping of its keys.
        kv_cache: `KVCacheConfig` or a mapping of its keys.
        revision: branch, tag or commit of the model on the Hub.
        draft_revision: the same for the draft.
        threads: number of threads that compute in this process, all engines of it included; None leaves it as it is.
        engine: keys of `EngineConfig` (dtype, device, max_batch_size, max_num_tokens, max_seq_len, ...), and of
            `KVCacheConfig` as the command line writes them: kv_cache_dtype, ...

    As a context manager it is closed at the end, which gives its memory back.

    Attributes:
        ranks: the other processes that compute the target, None for none. Where mpirun, torchrun or srun started this
            one as another rank than 0, the constructor computes for rank 0 and does not return.

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
        **engine: Unpack[EngineOptions],
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError(NO_WINDOWS)
        given: dict[str, Any] = dict(engine)
        pages = {name.removeprefix(CACHE): given.pop(name) for name in list(given) if name.startswith(CACHE)}
        cache = KVCacheConfig(**dict(KVCacheConfig.of(kv_cache)) | pages)
        config = EngineConfig(**given)
        if threads is not None:
            if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
                raise ConfigError(f"threads is {threads!r}, expected 1 to {MOST_THREADS}; leave it out for all cores")
            torch.set_num_threads(threads)
        join(os.environ, config.tensor_parallel_size)
        self.speculative = SpeculativeConfig.of(speculative)
        loaded = load_models(model, draft, (revision, draft_revision), config, self.speculative)
        self.method = default_method(self.speculative, loaded.draft)
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.config = loaded.target.config
        self.default_sampling: Mapping[str, Any] = loaded.sampling
        self.pooling, self.ranks = loaded.pooling, loaded.ranks
        self.engine: Engine
        self.engine, context = build_engine(loaded, self.speculative, config, cache)
        self.max_seq_len, self._remedy = context
        self._grammars = Grammars(self.tokenizer, self.config.vocab_size)
        self._ids = itertools.count()
        self._turn = RLock()  # several threads may call; one steps the engine at a time
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
        """Lets go of models and cache, and lets other ranks end; may be called twice. Nothing runs afterwards."""
        if hasattr(self, "engine"):
            del self.engine
            gc.collect()  # the parts of an engine refer to each other
        if self.ranks is not None:
            self.ranks.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Completes prompts together; in order of the prompts, n completions each.

        Args:
            prompts: text or token ids, one or several.
            params: for all prompts, or one for each; None is `get_default_sampling_params()`.
            progress: show a bar of finished completions on standard error, where that is a terminal.
            use_tqdm: vLLM's name for `progress`.
        """
        requests = self.requests(prompts, params)
        finished = (emission.finished for emission in self._run(requests))
        for _ in counted(finished, len(requests), "completions") if progress or use_tqdm else finished:
            pass
        return [Completion.of(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """The assistant's next turn of one conversation or several."""
        if not is_list(messages):
            raise RequestError(f"messages is {shown(messages)}, expected a list of messages with role and content")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.render_chat(chat) for chat in conversations], params)  # type: ignore[arg-type]

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt ids of a conversation, ready for the assistant's turn."""
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages), add_special_tokens=False)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request has that states no parameters: the model's recommendation, then our defaults. vLLM's name."""
        return SamplingParams(**self.default_sampling)

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Iterator[Chunk]:
        """The same as `generate`, step by step; closing the iterator cancels what is not finished."""
        for emission in self._run(self.requests(prompts, params)):
            yield Chunk.of(emission)

    def _run(self, requests: Sequence[Request]) -> Iterator[Emission]:
        """Steps the engine until these requests end; yields what each of them got, in their order."""
        going = {request.id for request in requests}
        got: dict[int, Emission] = {}

        def hear(report: StepReport) -> None:
            """Notes what these requests got: another iterator may step the engine too."""
            for emission in report.emissions:
                if (number := emission.request.id) in going:
                    got[number] = got[number].then(emission) if number in got else emission

        engine = self._opened_engine()
        with self._turn:
            engine.reports.append(hear)
        try:
            with self._turn:
                for request in requests:
                    engine.add(request)
            while going:
                with self._turn:
                    self._opened_engine()
                    if not got:
                        engine.step()
                    emissions = [got.pop(number) for number in sorted(got)]  # numbers are in order of the requests
                going -= {emission.request.id for emission in emissions if emission.finished}
                yield from emissions
        finally:
            with self._turn:
                engine.reports.remove(hear)
                for number in going:
                    engine.abort(number)

    def _opened_engine(self) -> Engine:
        if not hasattr(self, "engine"):
            raise EngineError("this LLM was closed; make a new one")
        return self.engine

    def requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Checked requests in order of the prompts, n each; none is in the engine yet."""
        self._opened_engine()
        prompts = _listed(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * len(prompts)
        if not is_list(params) or not all(isinstance(each, SamplingParams) for each in params):
            raise RequestError(f"params is {shown(params)}, expected SamplingParams or a list, one for each prompt")
        if len(params) != len(prompts):
            raise RequestError(f"got {len(params)} sampling parameters for {len(prompts)} prompts; give one or as many")
        known: dict[int, _Brought] = {}
        pairs = enumerate(zip(prompts, params, strict=True))
        return [made for index, pair in pairs for made in self.make_requests(*pair, index, known)]

    def make_requests(
        self, prompt: Prompt, params: SamplingParams, index: int = 0, known: dict[int, _Brought] | None = None
    ) -> list[Request]:
        """The n requests of one prompt, checked but not yet in the engine.

        Args:
            known: by id of parameters, what was read from them for other prompts; this prompt's is added.

        Raises:
            PromptTooLongError, RequestError: the prompt or a parameter cannot be served by this engine.
        """
        if not isinstance(prompt, str) and not is_list(prompt):
            raise RequestError(f"a prompt is {shown(prompt)}, expected a text or a list of token ids")
        try:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except RequestError as error:
            raise error.about("prompt") from error
        self._check_prompt(ids)
        self._check_sizes(params)
        speculation = self._speculation(params)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        end_ids = (token for token in self.tokenizer.eos_ids if token < self.config.vocab_size)
        eos = frozenset() if params.ignore_eos else frozenset(end_ids)
        stop_ids = eos | frozenset(params.stop_token_ids)
        drafters = [self.engine.drafters[method] for method in speculation.methods]
        bad_words = [ids for word in params.bad_words for ids in _spellings(self.tokenizer, word)]
        grammar, prediction = self._brought(params, speculation.methods, {} if known is None else known)
        vocab_size, device = self.config.vocab_size, self.engine.table.table.device

        def request(choice: int) -> Request:
            own_grammar = None if grammar is None else grammar.copy()
            sampling = RowSampling(
                params, choice_seed(seed, choice), ids, vocab_size, sorted(stop_ids), bad_words, device, own_grammar
            )
            return Request(
                id=next(self._ids),
                index=index,
                choice=choice,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_ids=ids,
                params=params,
                sampling=sampling,
                detokenizer=Detokenizer(self.tokenizer, ids, params),
                stop_ids=stop_ids,
                eos_ids=eos,
                method=speculation.method,
                methods=speculation.methods,
                adaptive=speculation.adaptive,
                draft_kv=next((drafter.namespace for drafter in drafters if drafter.namespace), ""),
                complete=any(drafter.taps and drafter.namespace for drafter in drafters),
                max_draft_len=speculation.max_draft_len,
                max_seq_len=self.max_seq_len,
                prediction=prediction,
            )

        return [request(choice) for choice in range(params.n)]

    def _brought(self, params: SamplingParams, methods: Sequence[str], known: dict[int, _Brought]) -> _Brought:
        """What comes with the parameters, read once for all prompts of a call."""
        if id(params) not in known:
            grammar = self._grammar(params)
            known[id(params)] = _Brought(grammar, self._prediction(params) if PREDICTION in methods else None)
        return known[id(params)]

    def _grammar(self, params: SamplingParams) -> InitialGrammar | None:
        """What the output may be, at its beginning."""
        asked, size = params.structured_outputs, self.config.vocab_size
        grammar: InitialGrammar | None = None if asked is None else self._grammars.compile(asked)
        if grammar is not None and asked is not None and asked.after is not None:
            spelled = [self.tokenizer.token_bytes(token) for token in range(size)]
            end_ids = [token for token in {*self.tokenizer.eos_ids, *params.stop_token_ids} if token < size]
            grammar = AfterMark(grammar, asked.after, asked.opens or "", spelled, end_ids)
        if params.allowed_token_ids is None:
            return grammar
        if (largest := max(params.allowed_token_ids)) >= size:
            raise RequestError(f"got {largest}, expected token ids 0 .. {size - 1}", field="allowed_token_ids")
        mask = torch.zeros(size, dtype=torch.bool)
        mask[list(params.allowed_token_ids)] = True
        return AllowedTokens(mask, grammar)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            words = "the prompt is empty: it has no tokens; expected text or at least one token id"
            raise RequestError(words, field="prompt")
        if len(ids) >= self.max_seq_len:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, the context holds {self.max_seq_len} with at least one of output",
                field="prompt",
                advice=f"shorten the prompt or {self._remedy}",
            )
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.config.vocab_size:
                expected = f"integers 0 .. {self.config.vocab_size - 1}"
                raise RequestError(f"{token!r} is not a token id; expected {expected}", field="prompt")

    def _check_sizes(self, params: SamplingParams) -> None:
        """Refuses what only this model's vocabulary and context make too large."""
        for name, limit in (
            ("logprobs", self.config.vocab_size),
            ("prompt_logprobs", self.config.vocab_size),
            ("min_tokens", self.max_seq_len),
            ("n", MOST_CHOICES),
        ):
            value = getattr(params, name)
            if value is not None and value > limit:
                raise RequestError(f"got {value}, expected at most {limit} for this model", field=name)

    @property
    def methods(self) -> tuple[str, ...]:
        """The drafters that any request may choose; not those that go with what a request brings."""
        return tuple(method for method in self.engine.drafters if method not in (PREDICTION, FORCED))

    def _prediction(self, params: SamplingParams) -> SuffixAutomaton:
        """The predicted output of a request; what would not fit the context cannot come true."""
        assert params.speculative is not None
        text = params.speculative.prediction or ""
        text = text[: MOST_PER_TOKEN * self.max_seq_len]  # what lies beyond the context is never reached
        return index_prediction(self.tokenizer.encode(text, add_special_tokens=False)[: self.max_seq_len])

    def _speculation(self, params: SamplingParams) -> _Speculation:
        """How a request is drafted: the engine's way, unless it asks for its own."""
        asked, longest = params.speculative or RequestSpeculation(), self.speculative.max_draft_len
        usual = PREDICTION if asked.prediction else self.method
        method = asked.method if asked.method is not None else usual
        if (method == PREDICTION) != bool(asked.prediction):
            raise RequestError(
                f"got {method!r} with {'a' if asked.prediction else 'no'} prediction, which is a method of its own",
                field="speculative",
                place=".method",
                advice="give a prediction without a method, or leave it out",
            )
        known = (NO_DRAFT, AUTO, PREDICTION, *self.methods)
        if method not in known:
            words = f"got {method!r}, this engine has {', '.join(known)}"
            raise RequestError(words, field="speculative", place=".method")
        if asked.max_draft_len is not None and asked.max_draft_len > longest:
            words = f"got {asked.max_draft_len}, expected at most {longest}, the engine's max_draft_len"
            raise RequestError(words, field="speculative", place=".max_draft_len")
        formed = params.structured_outputs is not None and method != PREDICTION
        if method == NO_DRAFT and asked.method is None and formed:
            method = FORCED
        if not asked.enabled or asked.max_draft_len == 0 or method == NO_DRAFT:
            return _Speculation(NO_DRAFT, (), False, 0)
        adaptive = self.speculative.adaptive if asked.adaptive is None else asked.adaptive
        methods = self.methods if method == AUTO else (method,)
        if formed:
            methods = tuple(dict.fromkeys((FORCED, *methods)))
        return _Speculation(method, methods, adaptive, asked.max_draft_len or longest)


class _Speculation(NamedTuple):
    """How one request is drafted; see the fields of `Request`."""

    method: str
    methods: tuple[str, ...]
    adaptive: bool
    max_draft_len: int


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several as several; a list of integers is one prompt."""
    if not isinstance(prompts, str) and not is_list(prompts):
        raise RequestError(f"the prompt is {shown(prompts)}, expected a text, a list of token ids, or several of them")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Token sequences of a bad word: at the beginning of a text and after a space."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip())]
    return [list(unique) for unique in dict.fromkeys(map(tuple, ids)) if unique]
