"""Sampling of one sequence, and of a batch of sequences as tensors.

`RowSampling` lives as long as its sequence; `Sampling` is built from rows and never changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import RequestError
from sametoken.options.sampling import SamplingParams
from sametoken.speculation.draft import PADDING
from sametoken.speculation.noise import wrap64
from sametoken.speculation.processors import (
    ANY,
    BadWords,
    Bias,
    EndBan,
    Penalties,
    Truncation,
    remember_counts,
    remember_words,
)
from sametoken.speculation.shaping import PathHistory, RowShapes
from sametoken.speculation.structure import Grammar

_MAX_CANDIDATES = 1024  # up to this top_k, selecting candidates first is cheaper than working on the whole vocabulary


class RowSampling:
    """Sampling state of one sequence: parameters as numbers, and the history of tokens.

    The history is the prompt and every token passed to `extend`, the pending token (node 0 of the next draft) included.
    Positions are absolute: the prompt takes 0 .. len(prompt_ids) - 1.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
        device: torch.device | str = "cpu",
        grammar: Grammar | None = None,
        breakers: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            params: parameters of the request.
            seed: of this choice, from `choice_seed`; taken modulo 2**64.
            prompt_ids: the prompt's tokens.
            vocab_size: V of the target's logits.
            end_ids: tokens that end the request (the model's own unless `ignore_eos`, and `stop_token_ids`).
            bad_word_ids: the token sequences of `params.bad_words`.
            device: device of the logits.
            grammar: grammar of the output in its initial state; owned by this sequence.
            breakers: tokens at which a repeated sequence ends for DRY.

        Raises:
            RequestError: a token id is outside the vocabulary or a bad word has no tokens.
        """
        _check_ids("logit_bias", params.logit_bias or (), vocab_size)
        _check_ids("stop_token_ids", end_ids, vocab_size, " or the model's end tokens")
        for word in bad_word_ids:
            _check_ids("bad_words", word, vocab_size)
            if not word:
                raise RequestError("a word has no tokens in this vocabulary", field="bad_words", advice="leave it out")
        self.seed, self.grammar = wrap64(seed), grammar
        self.device = torch.device(device)
        self.sampled = not params.greedy
        # float32 has to hold it; at 1e-30 any difference of scores outweighs any noise.
        self.temperature = min(max(params.temperature, 1e-30), 1e30) if self.sampled else 1.0
        self.top_k = min(params.top_k, vocab_size) if self.sampled and params.top_k > 0 else vocab_size
        self.top_p = params.top_p if self.sampled else 1.0
        self.max_cost = -math.log(params.min_p) if self.sampled and params.min_p > 0 else math.inf
        self.vocab_size = vocab_size
        self.bias = tuple((params.logit_bias or {}).items())
        self.end_ids = tuple(dict.fromkeys(end_ids)) if params.min_tokens > 0 else ()
        self.end_from = len(prompt_ids) + params.min_tokens
        self.bad_words = tuple(tuple(word) for word in bad_word_ids)
        self._memory = max((len(word) - 1 for word in self.bad_words), default=0)
        self.recent = list(prompt_ids[-self._memory :]) if self._memory else []
        self.penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.penalised = self.penalties != (1.0, 0.0, 0.0)
        shaping = params.shaping
        self.shaping = shaping if self.sampled and shaping is not None and shaping.shapes else None
        self.history: PathHistory | None = None
        if shaping is not None and (shaping.dry or (self.penalised and shaping.repeat_last_n is not None)):
            self.history = PathHistory(shaping, self.penalties, breakers, prompt_ids)
            self.penalised = self.penalised and shaping.repeat_last_n is None
        if self.penalised:
            _check_ids("prompt", prompt_ids, vocab_size)
            self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=self.device)
            self.prompt.index_fill_(0, torch.tensor(prompt_ids, dtype=torch.int64, device=self.device), True)
            self.counts = torch.zeros(vocab_size, device=self.device)

    @property
    def reusable(self) -> bool:
        """True if draws do not depend on the history, so that `Sampling` need not be rebuilt after `extend`."""
        return not (self.penalised or self._memory or self.on_host)

    @property
    def on_host(self) -> bool:
        """True if draws depend on state that exists only on the host."""
        return self.grammar is not None or self.history is not None or self.shaping is not None

    @property
    def failure(self) -> RequestError | None:
        """Reason why the grammar can no longer be enforced, or None."""
        return None if self.grammar is None else self.grammar.failure

    def accept(self, token: int) -> bool:
        """Advance the grammar by an emitted token; return True if no token may follow."""
        return self.grammar is not None and self.grammar.accept(token)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens to the history, in order."""
        if self.history is not None:
            self.history.extend(token_ids)
        if self._memory:
            self.recent = [*self.recent, *token_ids][-self._memory :]
        if self.penalised:
            index = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
            self.counts.index_add_(0, index, torch.ones(len(token_ids), device=self.device))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling state of B rows as tensors, [B, 1, 1] where combined with logits; a field is None if no row needs it.

    Attributes:
        seed: [B] int64; None when every row is greedy.
        temperature: float32; 1 for greedy rows.
        noise_scale: float32, 1 for sampled and 0 for greedy rows; None when all are sampled.
        truncation: min-p, top-k and top-p; None when nothing is truncated.
        bias, end_ban, words, penalties: logits processors.
        shape: llama.cpp samplers of the rows that use them.
        histories: one per row or None; read on the host.
        grammars: one per row or None; masks are made after the draft, on which they depend.
        candidates: greatest top_k if every sampled row has a small one, so that all draws are among so many; else 0.
        greedy: every draw is a plain argmax.
        reusable: valid until the composition of the batch changes; otherwise rebuild after every `extend`.
    """

    seed: Tensor | None
    temperature: Tensor | None
    noise_scale: Tensor | None
    truncation: Truncation | None
    bias: Bias | None
    end_ban: EndBan | None
    words: BadWords | None
    penalties: Penalties | None
    shape: RowShapes | None
    histories: tuple[PathHistory | None, ...] | None
    grammars: tuple[Grammar | None, ...] | None
    candidates: int
    greedy: bool
    reusable: bool

    @property
    def history(self) -> tuple[Tensor, ...]:
        """Tensors that `remember` updates in place."""
        words = () if self.words is None else (self.words.history,)
        return words if self.penalties is None else (*words, self.penalties.counts)

    def remember(self, tokens: Tensor, count: Tensor) -> None:
        """Append the first `count` [B] of the emitted `tokens` [B, N] to the history, on the device and in place.

        Only for a batch whose tensors belong to the caller and that has no grammars, which are host state.
        """
        if self.words is not None:
            remember_words(self.words, tokens, count)
        if self.penalties is not None:
            remember_counts(self.penalties, tokens, count)

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> Sampling:
        """Sampling of `rows`, which share a device and a vocabulary."""
        device = rows[0].device
        vocabulary = rows[0].vocab_size
        sampled = [row.sampled for row in rows]
        limits = [row.top_k for row in rows if row.sampled]
        limit = max(limits, default=vocabulary)
        grammars = tuple(row.grammar for row in rows)
        formed = any(grammar is not None for grammar in grammars)
        edited = any(row.bias or row.end_ids or row.bad_words or row.penalised for row in rows)
        shaped = [(place, row.temperature, row.shaping) for place, row in enumerate(rows) if row.shaping is not None]
        histories = tuple(row.history for row in rows)
        remembered = any(history is not None for history in histories)
        truncation = Truncation(
            _column([row.max_cost for row in rows], math.inf, device),
            _column([row.top_k for row in rows], vocabulary, device),
            _column([row.top_p for row in rows], 1.0, device, torch.float64),
        )
        return cls(
            seed=torch.tensor([row.seed for row in rows], device=device) if limits else None,
            temperature=_column([1.0 if row.shaping else row.temperature for row in rows], 1.0, device),
            noise_scale=_column([float(each) for each in sampled], 1.0, device),
            truncation=truncation if any(rule is not None for rule in truncation) else None,
            bias=_bias(rows) if edited else None,
            end_ban=_end_ban(rows) if edited else None,
            words=_bad_words(rows) if edited else None,
            penalties=_penalties(rows) if edited else None,
            shape=RowShapes.of(shaped, device) if shaped else None,
            histories=histories if remembered else None,
            grammars=grammars if formed else None,
            candidates=limit if limit < vocabulary and limit <= _MAX_CANDIDATES and not shaped else 0,
            greedy=not (limits or edited or formed or remembered),
            reusable=all(row.reusable for row in rows),
        )

    @property
    def edited(self) -> bool:
        """True if any row has logits processors or llama.cpp samplers."""
        editors = (self.bias, self.end_ban, self.words, self.penalties, self.shape, self.histories)
        return any(editor is not None for editor in editors)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int, place: str = "") -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            words = f"got token id {token}, expected 0 .. {vocab_size - 1}: the target has {vocab_size} tokens"
            raise RequestError(words, field=name, place=place, advice="remove it")


def _column(
    values: list[float], neutral: float, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Column [B, 1, 1] of values, or None if all are `neutral`."""
    if all(value == neutral for value in values):
        return None
    return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


def _bias(rows: Sequence[RowSampling]) -> Bias | None:
    entries = [(row, token, value) for row, each in enumerate(rows) for token, value in each.bias]
    if not entries:
        return None
    where, tokens, values = zip(*entries, strict=True)
    device = rows[0].device
    return Bias(
        torch.tensor(where, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _end_ban(rows: Sequence[RowSampling]) -> EndBan | None:
    entries = [(row, token, each.end_from) for row, each in enumerate(rows) for token in each.end_ids]
    if not entries:
        return None
    return EndBan(*torch.tensor(entries, device=rows[0].device).unbind(1))


def _bad_words(rows: Sequence[RowSampling]) -> BadWords | None:
    entries = [(row, word) for row, each in enumerate(rows) for word in each.bad_words]
    if not entries:
        return None
    length = max(len(word) for _, word in entries) - 1
    prefixes = [[*reversed(word[:-1]), *[ANY] * (length + 1 - len(word))] for _, word in entries]
    history = [[*reversed(row.recent), *[PADDING] * (length - len(row.recent))] for row in rows]
    device = rows[0].device
    return BadWords(
        torch.tensor([row for row, _ in entries], device=device),
        torch.tensor([word[-1] for _, word in entries], device=device),
        torch.tensor(prefixes, dtype=torch.int64, device=device).view(len(entries), length),
        torch.tensor(history, dtype=torch.int64, device=device).view(len(rows), length),
    )


def _penalties(rows: Sequence[RowSampling]) -> Penalties | None:
    where = [row for row, each in enumerate(rows) if each.penalised]
    if not where:
        return None
    device = rows[0].device
    factors = torch.tensor([rows[row].penalties for row in where], dtype=torch.float32, device=device)
    return Penalties(
        torch.tensor(where, device=device),
        factors.t().reshape(3, -1, 1, 1),
        torch.stack([rows[row].prompt for row in where]),
        torch.stack([rows[row].counts for row in where]),
    )
