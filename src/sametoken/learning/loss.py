"""Losses of guesses against the target's distribution, in chunks of places, with gradients in closed form.

The target's logits of a chunk are computed once for all steps; no tensor of places times vocabulary outlives its chunk.
Losses: forward KL, total variation, and LK (arXiv 2602.23881). Legend: K steps, N places, C places of a chunk, H hidden
size of the head, Ht of the target, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sametoken.learning.batch import guessing_slots

CHUNK_SCORES = 2**21  # logits of a chunk over all steps, to bound memory


class Teacher(NamedTuple):
    """Tensors from which the target's distribution is computed.

    Attributes:
        last: [N, Ht] last hidden states after the final norm.
        head: [V, Ht] output layer.
        following: int64 [N] token of the data after each place.
        draft_ids: int64 [Vd] ascending ids that the head can guess.
        cap: logits become cap tanh(logit / cap), None for no cap.
    """

    last: Tensor
    head: Tensor
    following: Tensor
    draft_ids: Tensor
    cap: float | None = None


@dataclass(frozen=True)
class LossRule:
    """Loss of a guess.

    Attributes:
        kind: "kl" for forward KL to the target's distribution over the draft vocabulary; "tv" for total variation, one
            minus the acceptance probability of a draw from the guess; "lk" for a mix; "hard" for the token of the data.
        mix: for "lk": "alpha" is -log of the acceptance, "adaptive" is share * KL + (1 - share) * TV with
            share = exp(-3 * acceptance) per guess, a number is a constant share.
        skip_outside: ignore places where the target's best token is outside the draft vocabulary.
    """

    kind: str = "kl"
    mix: str | float = "adaptive"
    skip_outside: bool = True

    LK_DECAY = 3.0

    def gradient(self, p: Tensor, excess: Tensor, acceptance: Tensor) -> Tensor:
        """Gradient [..., Vd] of a guess's loss by its logits; may overwrite `excess`.

        Args:
            p: probabilities of the target.
            excess: q - p, with the probabilities q of the guess.
            acceptance: [..., 1] sum of min(p, q).
        """
        if self.kind in ("kl", "hard"):
            return excess
        q, above = excess + p, (excess > 0).to(excess.dtype)
        rejected = (q * above).sum(-1, keepdim=True)
        varied = above.sub_(rejected).mul_(q)
        if self.kind == "tv":
            return varied
        if self.mix == "alpha":
            return varied.div_(acceptance.clamp(min=torch.finfo(q.dtype).tiny))
        share = self._share(acceptance)
        return varied.mul_(1 - share).add_(excess.mul_(share))

    def value(self, divergence: Tensor, acceptance: Tensor) -> Tensor:
        """Loss of a guess from its cross-entropy or KL and its acceptance, each [...]."""
        if self.kind in ("kl", "hard"):
            return divergence
        if self.kind == "tv":
            return 1 - acceptance
        if self.mix == "alpha":
            return -acceptance.clamp(min=torch.finfo(acceptance.dtype).tiny).log()
        share = self._share(acceptance)
        return share * divergence + (1 - share) * (1 - acceptance)

    def _share(self, acceptance: Tensor) -> Tensor:
        """Share of KL, a constant for the gradient."""
        if self.mix == "adaptive":
            return torch.exp(-self.LK_DECAY * acceptance)
        return torch.full_like(acceptance, float(self.mix))


class AcceptanceMetrics(NamedTuple):
    """Sums over the counted guesses, each float64 [K]; additive over batches.

    Attributes:
        counted: number of guesses.
        loss: sum of losses.
        acceptance: sum of the acceptance probabilities, sum of min(p, q).
        correct: number of guesses whose best token is the target's.
        reached: number of guesses after a correct path.
        path: number of correct guesses after a correct path.
    """

    counted: Tensor
    loss: Tensor
    acceptance: Tensor
    correct: Tensor
    reached: Tensor
    path: Tensor

    def __add__(self, other: AcceptanceMetrics) -> AcceptanceMetrics:  # type: ignore[override]
        return AcceptanceMetrics(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def acceptance_length(self) -> float:
        """Expected tokens per forward for greedy chains of K guesses, bonus included."""
        rates = self.path / self.reached.clamp(min=1)
        return float(1 + rates.cumprod(0).sum())


def guess_loss(
    states: Tensor, heads: Sequence[Tensor], teacher: Teacher, weights: Tensor, rule: LossRule
) -> tuple[Tensor, AcceptanceMetrics]:
    """Compute the weighted loss and the metrics of all guesses.

    Args:
        states: [K, N, H] inputs of the output layers, by slot.
        heads: [Vd, H] output layers: one for all steps, or one per step.
        weights: [K, N] by place, from `batch.guess_weights`.

    Returns:
        Scalar with gradients for `states` and every head that requires them, and metrics without gradients.
    """
    report: list[AcceptanceMetrics] = []
    loss: Tensor = _GuessLoss.apply(states, teacher, weights, rule, report.append, *heads)  # type: ignore[no-untyped-call]
    return loss, report[0]


class _GuessLoss(torch.autograd.Function):
    """Loss with gradients, computed chunk by chunk, so that no tensor of the vocabulary's width is saved."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, teacher: Teacher, weights: Tensor, rule: LossRule,
        tell: Callable[[AcceptanceMetrics], None], *heads: Tensor,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(states.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            work = _Work(states, teacher, weights.to(wide), rule, heads, ctx.needs_input_grad)
            places = weights.any(0).nonzero().squeeze(1)
            for chunk in torch.split(places, max(1, CHUNK_SCORES // (len(states) * len(teacher.draft_ids)))):
                work.chunk(chunk)
        tell(work.report())
        ctx.save_for_backward(work.d_states, *work.d_heads)
        return work.loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        above = gradients[0]
        d_states, *d_heads = ctx.saved_tensors
        scaled = [part * above.to(part.dtype) if part.numel() else None for part in d_heads]
        return d_states * above.to(d_states.dtype), None, None, None, None, *scaled


class _Taught(NamedTuple):
    """Distributions of the target over the draft vocabulary at the places of a chunk.

    Attributes:
        p: [C, Vd] probabilities.
        best: int64 [C] index in p of the best token.
        inside: bool [C], true if no token outside the draft vocabulary is better; true where places are not skipped.
        entropy: [C] entropy in nats.
    """

    p: Tensor
    best: Tensor
    inside: Tensor
    entropy: Tensor


class _Work:
    """Accumulators of one call."""

    def __init__(
        self, states: Tensor, teacher: Teacher, weights: Tensor, rule: LossRule, heads: Sequence[Tensor],
        needed: Sequence[bool],
    ) -> None:  # fmt: skip
        steps, places = weights.shape
        self.states, self.teacher, self.weights, self.rule = states, teacher, weights, rule
        self.heads = [head.detach().to(states.dtype) for head in heads]
        self.d_states = torch.zeros_like(states)
        trained = [head.shape if needs else (0,) for head, needs in zip(heads, needed[5:], strict=True)]
        self.d_heads = [torch.zeros(shape, dtype=weights.dtype, device=states.device) for shape in trained]
        self.loss = weights.new_zeros(())
        # By step and place: counted, loss, acceptance, correct.
        self.sums = torch.zeros(4, steps, places, dtype=weights.dtype, device=states.device)
        # Scores of tokens outside the draft vocabulary only determine which places are skipped.
        whole = rule.skip_outside or len(teacher.draft_ids) == len(teacher.head)
        self.teaching = teacher.head if whole else teacher.head[teacher.draft_ids]

    def chunk(self, places: Tensor) -> None:
        """Evaluate the guesses of all steps about `places` [C]."""
        taught = self._target(places)
        slots = guessing_slots(len(self.states), places)
        weights = self.weights[:, places] * (slots >= 0)
        if self.rule.skip_outside or self.rule.kind == "hard":
            weights = weights * taught.inside
        count = len(self.states)
        groups = [range(count)] if len(self.heads) == 1 else [range(k, k + 1) for k in range(count)]
        for steps, head, d_head in zip(groups, self.heads, self.d_heads, strict=True):
            part = slice(steps.start, steps.stop)
            read = torch.stack([self.states[k][slots[k].clamp(min=0)] for k in steps])
            scores = F.linear(read, head).to(taught.p.dtype)
            figures, gradient = _scored(scores, taught, self.rule)
            gradient.mul_(weights[part].unsqueeze(-1))
            counted = weights[part] > 0
            self.sums[:, part, places] = torch.stack([counted, *(counted * each for each in figures)]).to(self.sums)
            self.loss += (weights[part] * figures[0]).sum()
            gradient = gradient.to(read.dtype)
            for k, d_read in zip(steps, gradient @ head, strict=True):
                self.d_states[k].index_add_(0, slots[k].clamp(min=0), d_read)
            if d_head.numel():
                d_head += gradient.flatten(0, 1).T @ read.flatten(0, 1)

    def _target(self, places: Tensor) -> _Taught:
        teacher = self.teacher
        if self.rule.kind == "hard":
            wanted = teacher.following[places]
            index = torch.searchsorted(teacher.draft_ids, wanted).clamp_(max=len(teacher.draft_ids) - 1)
            sure = self.weights.new_zeros(len(places), len(teacher.draft_ids)).scatter_(1, index.unsqueeze(1), 1.0)
            return _Taught(sure, index, teacher.draft_ids[index] == wanted, self.weights.new_zeros(len(places)))
        every = F.linear(teacher.last[places].to(self.teaching.dtype), self.teaching)
        some = every[:, teacher.draft_ids] if len(self.teaching) > len(teacher.draft_ids) else every
        scores = some.to(self.weights.dtype)
        scores = scores if teacher.cap is None else torch.tanh(scores / teacher.cap) * teacher.cap
        top, best = scores.max(-1)
        inside = some.amax(-1) >= every.amax(-1)  # before the cap, which keeps the order
        p = torch.softmax(scores, -1)
        return _Taught(p, best, inside, _log_sum(top, p) - scores.mul_(p).sum(-1))

    def report(self) -> AcceptanceMetrics:
        """Metrics by step; correct paths are counted along places."""
        counted, loss, acceptance, correct = self.sums.to(torch.float64)
        path, reached = [], []
        before = torch.ones_like(counted[0])
        for k in range(len(counted)):
            reached.append(counted[k] * before)
            path.append(reached[k] * correct[k])
            before = torch.zeros_like(before)
            before[1:] = path[k][:-1]
        sums = (each.sum(-1) for each in (counted, loss, acceptance, correct, torch.stack(reached), torch.stack(path)))
        return AcceptanceMetrics(*sums)


def _log_sum(top: Tensor, probabilities: Tensor) -> Tensor:
    """Log-sum-exp of scores from the largest score and the softmax, whose largest entry cannot vanish."""
    return top - probabilities.amax(-1).log()


def _scored(scores: Tensor, taught: _Taught, rule: LossRule) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Loss, acceptance and correctness [K, C] of guesses with logits `scores` [K, C, Vd], and the gradient."""
    p, best = taught.p, taught.best
    top = scores.amax(-1)
    correct = scores.gather(-1, best.expand(top.shape).unsqueeze(-1)).squeeze(-1) >= top
    q = torch.softmax(scores, -1)
    divergence = _log_sum(top, q) - scores.mul_(p).sum(-1) - taught.entropy
    excess = q.sub_(p)
    # The sum of min(p, q), since both sum to 1.
    acceptance = 1 - torch.linalg.vector_norm(excess, 1, -1, keepdim=True) / 2
    value = rule.value(divergence, acceptance.squeeze(-1))
    return (value, acceptance.squeeze(-1), correct), rule.gradient(p, excess, acceptance)


def feature_loss(recycled: Tensor, last: Tensor, weights: Tensor) -> Tensor:
    """SmoothL1 loss between the predicted features [K, N, H] and the target's [N, H], with the guesses' weights."""
    places = weights.any(0).nonzero().squeeze(1)
    slots = guessing_slots(len(recycled), places)
    guessed = torch.stack([recycled[k][slots[k].clamp(min=0)] for k in range(len(recycled))]).float()
    wanted = last[places].float().expand_as(guessed)
    errors = F.smooth_l1_loss(guessed, wanted, reduction="none").mean(-1)
    return (weights[:, places] * (slots >= 0) * errors).sum()
