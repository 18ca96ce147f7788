"""Proof that speculation changes no token: plain and speculative output of equal requests, compared by token id.

The reference is plain decoding of one prompt at a time; a case differs from it in method, batch or both.

    found = list(prove(llm, encode_texts(llm.tokenizer), SamplingParams(max_tokens=64, seed=0)))
    assert all(comparison.difference is None for comparison in found)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from sametoken.engine.completion import Completion
from sametoken.engine.llm import LLM
from sametoken.errors import ConfigError
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.options.speculation import MODEL_METHODS
from sametoken.prompts.sources import EncodedPrompt

PLAIN = "none"
TEMPERATURES = (0.0, 0.7, 1.0)


class Case(NamedTuple):
    """Settings of a run of all prompts; `batched` runs them together."""

    method: str
    temperature: float
    batched: bool


class Difference(NamedTuple):
    """First token that differs.

    Attributes:
        prompt: index of the prompt.
        position: index of the output token.
        plain: token id of plain decoding; None past its end.
        speculative: token id of the case; None past its end.
        margin: best minus second-best raw logit of the target in plain decoding; None past its end.
    """

    prompt: int
    position: int
    plain: int | None
    speculative: int | None
    margin: float | None


class Comparison(NamedTuple):
    """Result of a case.

    Attributes:
        case: settings.
        tokens: number of compared tokens.
        acceptance_length: tokens per target forward over all prompts.
        difference: first difference, or None.
    """

    case: Case
    tokens: int
    acceptance_length: float
    difference: Difference | None


def prove(
    llm: LLM,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    temperatures: Sequence[float] = TEMPERATURES,
    methods: Sequence[str] | None = None,
) -> Iterator[Comparison]:
    """Run all cases, and yield the result of each.

    Args:
        llm: engine.
        prompts: prompts.
        params: parameters of all prompts; the temperature is replaced, and prompt i has seed `params.seed + i`.
        temperatures: temperatures.
        methods: drafters; None selects plain batches and all drafters of the engine.

    Raises:
        ConfigError: the engine has no such drafter.
    """
    if missing := [m for m in methods or () if m not in (PLAIN, *llm.methods)]:
        kind, known = MODEL_METHODS.get(missing[0], "a draft"), ", ".join(llm.methods)
        raise ConfigError(f"--method {missing[0]} needs {kind}; give --draft PATH (this engine has {known})")
    proof = Proof(llm, [prompt.ids for prompt in prompts], params)
    return proof.run(methods or (PLAIN, *llm.methods), temperatures)


def in_words(llm: LLM, found: Comparison, prompts: Sequence[EncodedPrompt]) -> str:
    """Line on the first difference of a comparison, which must have one."""
    assert found.difference is not None
    index, position, plain, other, margin = found.difference
    case, batch = found.case, "batched" if found.case.batched else "one by one"
    gap = "past the end of the plain output" if margin is None else f"logit margin there {margin:.6g}"
    return (
        f"first difference: method {case.method}, temperature {case.temperature:g}, {batch}, prompt {index} "
        f"{prompts[index].text!r}, position {position}: plain {_token(llm, plain)}, "
        f"speculative {_token(llm, other)}; {gap}"
    )


def _token(llm: LLM, token: int | None) -> str:
    return "nothing (it ended)" if token is None else f"{token} {llm.tokenizer.token_text(token)!r}"


@contextmanager
def without_advice() -> Iterator[None]:
    """Suppress the engine's warnings on drafts that do not pay: a proof runs every method on purpose."""
    log = logging.getLogger("sametoken")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@dataclass(frozen=True, slots=True)
class Proof:
    """Engine, prompts and sampling parameters of a proof.

    Attributes:
        llm: engine.
        prompts: token ids of each prompt.
        params: parameters of all prompts; the temperature is replaced, and prompt i has seed `params.seed + i`.
    """

    llm: LLM
    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    def run(self, methods: Sequence[str], temperatures: Sequence[float]) -> Iterator[Comparison]:
        """Comparisons of all cases, ordered by temperature."""
        for temperature in temperatures:
            plain = Case(PLAIN, temperature, batched=False)
            reference = self._complete(plain)
            cases = [Case(m, temperature, batched) for m in methods for batched in (False, True)]
            for case in cases:
                if case != plain:
                    yield self._compare(case, reference, self._complete(case))

    def _params(self, case: Case) -> list[SamplingParams]:
        seed = self.params.seed or 0
        speculative = RequestSpeculation(method=case.method, adaptive=False)  # drafts at every step
        common = replace(self.params, temperature=case.temperature, speculative=speculative)
        return [replace(common, seed=seed + i) for i in range(len(self.prompts))]

    def _complete(self, case: Case) -> list[Completion]:
        params = self._params(case)
        if case.batched:
            return self.llm.generate(self.prompts, params)
        return [self.llm.generate(prompt, own)[0] for prompt, own in zip(self.prompts, params, strict=True)]

    def _compare(self, case: Case, reference: Sequence[Completion], found: Sequence[Completion]) -> Comparison:
        stats = [completion.speculation for completion in found]
        forwards = sum(s.target_forwards for s in stats)
        return Comparison(
            case,
            tokens=sum(max(len(a.token_ids), len(b.token_ids)) for a, b in zip(reference, found, strict=True)),
            acceptance_length=sum(s.emitted for s in stats) / forwards if forwards else 0.0,
            difference=self._first_difference(case, reference, found),
        )

    def _first_difference(
        self, case: Case, reference: Sequence[Completion], found: Sequence[Completion]
    ) -> Difference | None:
        for prompt, (plain, other) in enumerate(zip(reference, found, strict=True)):
            for position, (a, b) in enumerate(zip_longest(plain.token_ids, other.token_ids)):
                if a != b:
                    return Difference(prompt, position, a, b, self._margin(case, prompt, position))
        return None

    def _margin(self, case: Case, prompt: int, position: int) -> float | None:
        """Difference of the two best logits, from log-probabilities of a repeated plain run."""
        params = self._params(case._replace(method=PLAIN))[prompt]
        scored = self.llm.generate(self.prompts[prompt], replace(params, logprobs=2))[0].logprobs or []
        if position >= len(scored):
            return None
        (_, best), (_, second) = scored[position].top[:2]
        return best - second
