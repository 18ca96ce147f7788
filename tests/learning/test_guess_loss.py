"""Losses against torch's own autograd over whole vocabularies, in float64; goals against loops over documents."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from sametoken.learning import loss as losses
from sametoken.learning.batch import Batch, guess_weights
from sametoken.learning.loss import LossRule, Teacher, feature_loss, guess_loss

LENGTHS, VOCABULARY, DRAFT = (7, 2, 9), 13, 8
RULES = [
    LossRule("kl"), LossRule("tv"), LossRule("lk", "alpha"), LossRule("lk", "adaptive"), LossRule("lk", 0.25),
    LossRule("hard"), LossRule("kl", skip_outside=False),
]  # fmt: skip


def random_batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    return Batch.of([(each, torch.rand(len(each), generator=generator) < 0.7) for each in tokens])


def random_problem(steps: int, heads: int, ids: torch.Tensor, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(seed)
    count = len(batch.tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    states = random(steps, count, 5).requires_grad_(True)
    layers = [random(len(ids), 5).requires_grad_(True) for _ in range(heads)]
    last, target_head = random(count, 6), random(VOCABULARY, 6)
    return batch, states, layers, Teacher(last, target_head, batch.ahead(1), ids)


def by_hand(batch, states, layers, teacher, weights, rule):
    """The same loss one guess at a time, over whole vocabularies, by autograd."""
    total = states.new_zeros(())
    for k in range(len(states)):
        layer = layers[k if len(layers) > 1 else 0]
        for place in range(len(batch.tokens)):
            slot = place - 1 - k
            full = teacher.last[place] @ teacher.head.T
            if slot < 0 or not weights[k, place]:
                continue
            wanted = int(batch.tokens[place + 1]) if rule.kind == "hard" else int(full.argmax())
            if rule.skip_outside and wanted not in teacher.draft_ids:
                continue
            p = full[teacher.draft_ids].softmax(-1)
            log_q = (states[k, slot] @ layer.T).log_softmax(-1)
            acceptance = torch.minimum(p, log_q.exp()).sum()
            divergence = F.kl_div(log_q, p, reduction="sum")
            if rule.kind == "kl":
                value = divergence
            elif rule.kind == "hard":
                value = -log_q[(teacher.draft_ids == wanted).nonzero().item()]
            elif rule.kind == "tv":
                value = 0.5 * (p - log_q.exp()).abs().sum()
            elif rule.mix == "alpha":
                value = -acceptance.log()
            else:
                share = torch.exp(-3 * acceptance.detach()) if rule.mix == "adaptive" else rule.mix
                value = share * divergence + (1 - share) * 0.5 * (p - log_q.exp()).abs().sum()
            total = total + weights[k, place] * value
    return total


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("size", [DRAFT, VOCABULARY])
def test_value_and_gradients_equal_autograd(rule, heads, size, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_SCORES", 4 * 3 * size)  # four places a chunk
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:size].sort().values
    batch, states, layers, teacher = random_problem(3, heads, ids)
    weights = guess_weights(batch, 3, 0.8, per_document=True).weights.double()
    found, _ = guess_loss(states, layers, teacher, weights, rule)
    expected = by_hand(batch, states, layers, teacher, weights, rule)
    assert expected > 0
    torch.testing.assert_close(found, expected)
    leaves = [states, *layers]
    gradients = [torch.autograd.grad(2 * value, leaves) for value in (found, expected)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


def test_frozen_output_layers_get_no_gradient():
    ids = torch.arange(VOCABULARY)
    batch, states, layers, teacher = random_problem(2, 1, ids)
    weights = guess_weights(batch, 2, 1.0, per_document=True).weights.double()
    found, _ = guess_loss(states, [layers[0].detach()], teacher, weights, LossRule())
    found.backward()
    assert layers[0].grad is None
    assert states.grad is not None
    assert states.grad.abs().sum() > 0


def test_report_follows_paths():
    """Accuracy on condition that a path was right so far, against one loop per slot."""
    ids = torch.arange(VOCABULARY)
    batch, _, _, teacher = random_problem(3, 1, ids)
    count = len(batch.tokens)
    noise = torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    # Some guesses are right: slots that read what the target's own output layer reads there.
    ahead = [teacher.last[torch.arange(1 + k, 1 + k + count).clamp(max=count - 1)] for k in range(3)]
    states = torch.stack([torch.where(noise[:, :1] > -0.6, each, noise) for each in ahead])
    weights = guess_weights(batch, 3, 1.0, per_document=False).weights.double()
    _, report = guess_loss(states, [teacher.head], teacher, weights, LossRule())
    counted, reached, path = torch.zeros(3, 3, dtype=torch.float64)
    for slot in range(len(batch.tokens)):
        right = True
        for k in range(3):
            place = slot + 1 + k
            if place >= len(batch.tokens) or not weights[k, place]:
                break
            counted[k] += 1
            reached[k] += right
            guess, best = ((each @ teacher.head.T).argmax() for each in (states[k, slot], teacher.last[place]))
            right = right and bool(guess == best)
            path[k] += right
    assert 0 < path[2] < path[0] < counted[0]
    torch.testing.assert_close(report.counted, counted)
    torch.testing.assert_close(report.reached, reached)
    torch.testing.assert_close(report.path, path)
    torch.testing.assert_close(report.acceptance_length, float(1 + (path / reached).cumprod(0).sum()))


@pytest.mark.parametrize("per_document", [True, False])
def test_goals_count_every_draft_within_a_masked_stretch(per_document):
    batch, steps, decay = random_batch(), 4, 0.5
    found = guess_weights(batch, steps, decay, per_document=per_document)
    starts = torch.tensor((0, *LENGTHS)).cumsum(0).tolist()
    expected = torch.zeros(steps, len(batch.tokens))
    documents = []
    for start, end in pairwise(starts):
        for slot in range(start, end):
            for k in range(steps):
                guessed = range(slot + 2, slot + 3 + k)  # the token after what the slot read, and so on
                if guessed.stop <= end and all(batch.mask[i] for i in guessed):
                    expected[k, slot + 1 + k] = 1
        rows = expected[:, start:end]
        documents.append(bool(rows[0].any()))
        if per_document:
            rows /= rows.sum(1, keepdim=True).clamp(min=1)
    total = sum(documents) if per_document else int(expected[0].sum())
    shares = decay ** torch.arange(4.0)
    torch.testing.assert_close(found.weights, expected * (shares / shares.sum()).unsqueeze(1))
    assert found.total == total


def test_the_first_draft_of_an_answer_is_trained():
    """The slot at the end of a prompt reads the answer's first token and guesses the second."""
    mask = torch.tensor([False, False, False, True, True, True])
    found = guess_weights(Batch(torch.arange(6), mask, (6,)), 2, 1.0, per_document=False).weights > 0
    assert found[0].tolist() == [False, False, True, True, True, False]  # guesses about places 2 .. 4 are tokens 3 .. 5
    assert found[1].tolist() == [False, False, False, True, True, False]


def test_feature_loss_is_the_mean_over_counted_slots():
    batch = random_batch()
    recycled = torch.randn(2, len(batch.tokens), 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    last = torch.randn(len(batch.tokens), 6, generator=torch.Generator().manual_seed(1))
    weights = guess_weights(batch, 2, 1.0, per_document=False).weights
    expected = sum(
        weights[k, place] * F.smooth_l1_loss(recycled[k, place - 1 - k], last[place])
        for k in range(2) for place in range(len(last)) if weights[k, place]
    )  # fmt: skip
    torch.testing.assert_close(feature_loss(recycled, last, weights), expected)
