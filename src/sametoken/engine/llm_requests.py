"""Making of checked requests from prompts and sampling parameters, for one engine."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from sametoken.checkpoint.chat import is_list
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.drafters.automaton import SuffixAutomaton
from sametoken.drafters.prediction import index_prediction
from sametoken.engine.build import Context
from sametoken.engine.confined import AfterMark, AllowedTokens, BoundedThought, InitialGrammar
from sametoken.engine.detokenize import Detokenizer
from sametoken.engine.engine import Engine
from sametoken.engine.grammar import Grammars
from sametoken.engine.request import Request
from sametoken.errors import PromptTooLongError, RequestError, shown
from sametoken.kinds import coming_with, kinds
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.options.speculation import AUTO, NO_DRAFT, SpeculativeConfig
from sametoken.speculation.noise import choice_seed
from sametoken.speculation.sampling import RowSampling

Prompt = str | Sequence[int]
MOST_CHOICES = 1024
PREDICTION, FORCED = coming_with("prediction"), coming_with("structured_outputs")
MOST_PER_TOKEN = 32  # characters of a text per token, on average


class Parsed(NamedTuple):
    """Objects that are slow to build from sampling parameters, shared by the prompts of a call."""

    grammar: InitialGrammar | None
    prediction: SuffixAutomaton | None


UNMIXED = {kind.name for kind in kinds() if not kind.mixed}


class RequestMaker:
    """Maker of the requests of one engine.

    Args:
        engine: engine with the drafters that requests may use.
        tokenizer: tokenizer of the target.
        vocab_size: number of tokens of the target.
        speculative: default drafting of requests, and the longest draft of any request.
        method: default drafting method of requests.
        context: longest sequence, and advice for raising it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        vocab_size: int,
        speculative: SpeculativeConfig,
        method: str,
        context: Context,
    ) -> None:
        self.engine, self.tokenizer, self.vocab_size = engine, tokenizer, vocab_size
        self.speculative, self.method = speculative, method
        self.max_seq_len, self._remedy = context
        self._grammars = Grammars(tokenizer, vocab_size)
        self._ids = itertools.count()
        self._breaking: dict[tuple[bytes, ...], frozenset[int]] = {}

    @property
    def methods(self) -> tuple[str, ...]:
        """Drafting methods that any request may choose, without those that depend on the request's content."""
        return tuple(method for method in self.engine.drafters if method not in (PREDICTION, FORCED))

    @cached_property
    def _spelled(self) -> list[bytes]:
        """Bytes of every token of the target."""
        return [self.tokenizer.token_bytes(token) for token in range(self.vocab_size)]

    def make(
        self, prompt: Prompt, params: SamplingParams, index: int = 0, known: dict[int, Parsed] | None = None
    ) -> list[Request]:
        """Make the n requests of one prompt, checked but not yet in the engine.

        Args:
            prompt: text or token ids.
            params: sampling parameters.
            index: number of the prompt in its call.
            known: objects built for other prompts, by `id` of their parameters; those of this prompt are added.

        Raises:
            PromptTooLongError, RequestError: this engine cannot serve the prompt or a parameter.
        """
        if not isinstance(prompt, str) and not is_list(prompt):
            raise RequestError(f"a prompt is {shown(prompt)}, expected a text or a list of token ids")
        if isinstance(prompt, str):
            self.check_length(prompt)
        try:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except RequestError as error:
            raise error.about("prompt") from error
        self._check_prompt(ids)
        self._check_sizes(params)
        speculation = self._speculation(params)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        end_ids = (token for token in self.tokenizer.eos_ids if token < self.vocab_size)
        eos = frozenset() if params.ignore_eos else frozenset(end_ids)
        stop_ids = eos | frozenset(params.stop_token_ids)
        drafters = [self.engine.drafters[method] for method in speculation.methods]
        bad_words = [ids for word in params.bad_words for ids in _spellings(self.tokenizer, word)]
        breakers = self._breakers(params)
        grammar, prediction = self._parsed(params, speculation.methods, {} if known is None else known)
        device, blocks = self.engine.table.table.device, self.engine.scheduler.blocks

        def request(choice: int) -> Request:
            own_grammar = None if grammar is None else grammar.copy()
            sampling = RowSampling(
                params,
                choice_seed(seed, choice),
                ids,
                self.vocab_size,
                sorted(stop_ids),
                bad_words,
                device,
                own_grammar,
                breakers,
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
                page_size=blocks.page_size if blocks.reuse else 0,
                prediction=prediction,
            )

        return [request(choice) for choice in range(params.n)]

    def _parsed(self, params: SamplingParams, methods: Sequence[str], known: dict[int, Parsed]) -> Parsed:
        """Objects built from the parameters, once for all prompts of a call."""
        if id(params) not in known:
            grammar = self._grammar(params)
            known[id(params)] = Parsed(grammar, self._prediction(params) if PREDICTION in methods else None)
        return known[id(params)]

    def _grammar(self, params: SamplingParams) -> InitialGrammar | None:
        """Grammar of the output in its initial state; None for none."""
        asked, size = params.structured_outputs, self.vocab_size
        grammar: InitialGrammar | None = None if asked is None else self._grammars.compile(asked)
        after, bound = asked.after if asked is not None else None, params.thought_bound
        if grammar is not None and asked is not None and after is not None:
            end_ids = [token for token in {*self.tokenizer.eos_ids, *params.stop_token_ids} if token < size]
            grammar = AfterMark(grammar, after, asked.opens or "", self._spelled, end_ids)
        if bound is not None:
            grammar = BoundedThought(grammar, bound, self._spelled, self.tokenizer.encode(bound.closes, False))
        if params.allowed_token_ids is None:
            return grammar
        mask = torch.zeros(size, dtype=torch.bool)
        mask[list(params.allowed_token_ids)] = True
        return AllowedTokens(mask, grammar)

    def _breakers(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that contain one of the texts at which DRY ends a repeated sequence."""
        if params.shaping is None or not params.shaping.dry:
            return frozenset()
        texts = tuple(text.encode() for text in params.shaping.dry_sequence_breakers)
        if texts not in self._breaking:
            self._breaking = {texts: frozenset(
                token for token in range(self.vocab_size)
                if any(text in self.tokenizer.token_bytes(token) for text in texts)
            )}  # fmt: skip
        return self._breaking[texts]

    def check_length(self, text: str) -> None:
        """Raise PromptTooLongError if a text cannot fit the context, by its length alone."""
        self.tokenizer.check_length(text, self.max_seq_len, self._remedy)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            words = "the prompt is empty: it has no tokens; expected text or at least one token id"
            raise RequestError(words, field="prompt")
        if len(ids) >= self.max_seq_len:
            raise PromptTooLongError.of(len(ids), self.max_seq_len, self._remedy)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                expected = f"integers 0 .. {self.vocab_size - 1}"
                words = "out of vocabulary" if isinstance(token, int) else "not a token id"
                raise RequestError(f"{token!r} is {words}; expected {expected}", field="prompt")

    def _check_sizes(self, params: SamplingParams) -> None:
        """Raise RequestError if a parameter exceeds this model's vocabulary or context."""
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if (largest := max(getattr(params, name) or (0,))) >= self.vocab_size:
                raise RequestError(f"got {largest}, expected token ids 0 .. {self.vocab_size - 1}", field=name)
        for name, limit in (
            ("logprobs", self.vocab_size),
            ("prompt_logprobs", self.vocab_size),
            ("min_tokens", self.max_seq_len),
            ("n", MOST_CHOICES),
        ):
            value = getattr(params, name)
            if value is not None and value > limit:
                raise RequestError(f"got {value}, expected at most {limit} for this model", field=name)

    def _prediction(self, params: SamplingParams) -> SuffixAutomaton:
        """Index of the predicted output of a request; text beyond the context is left out."""
        assert params.speculative is not None
        text = params.speculative.prediction or ""
        text = text[: MOST_PER_TOKEN * self.max_seq_len]  # more cannot fit
        return index_prediction(self.tokenizer.encode(text, add_special_tokens=False)[: self.max_seq_len])

    def _speculation(self, params: SamplingParams) -> _Speculation:
        """Drafting of a request: its own choice, or the engine's default."""
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
        methods = tuple(each for each in self.methods if each not in UNMIXED) if method == AUTO else (method,)
        if formed:
            methods = tuple(dict.fromkeys((FORCED, *methods)))
        return _Speculation(method, methods, adaptive, asked.max_draft_len or longest)


class _Speculation(NamedTuple):
    """Drafting of one request; see the fields of `Request`."""

    method: str
    methods: tuple[str, ...]
    adaptive: bool
    max_draft_len: int


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as a sequence of prompts; a list of integers is one prompt."""
    if not isinstance(prompts, str) and not is_list(prompts):
        raise RequestError(f"the prompt is {shown(prompts)}, expected a text, a list of token ids, or several of them")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Token sequences of a bad word: at the beginning of a text and after a space."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip())]
    return [list(unique) for unique in dict.fromkeys(map(tuple, ids)) if unique]
