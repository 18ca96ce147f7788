"""The EAGLE drafter guesses what its head says of the whole sequence, whatever became of earlier guesses.

The oracle is `head_checks.Reference` on the features that transformers computes, in float32 and without any cache. An
engine is driven by drafts that are partly true, so that paths of every length are accepted; the head's own guesses
are recorded beside them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from adversaries import future
from drafter_checks import check_draft, drafted, tree_paths
from engine_checks import DEPTH, PAGE, alone, check_idle, prompts, said, save_pair, watch
from head_checks import Reference, eagle_config, llm_with, random_weights, shape_of, weights_of
from sametoken import LLM, SamplingParams
from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import Guess, chain
from sametoken.engine.scheduler import Plan
from sametoken.heads.eagle.drafter import EagleDrafter
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.modules import pack
from sametoken.speculation.sampling import Sampling
from tiny_models import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


class Target(NamedTuple):
    """A target on disk and as transformers has it."""

    directory: str
    model: PreTrainedModel


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory, _ = save_pair("llama-3.1", tmp_path_factory.mktemp("pair"))
    return Target(directory, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())


def features_of(target: Target, text: Sequence[int], head: EagleHead) -> Tensor:
    """[len(text), W] of the text alone; transformers' last hidden state is after the final norm already."""
    with torch.no_grad():
        states = target.model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    found = [states[-1]] if head.config.version == 1 else [states[tap + 1] for tap in head.config.taps]
    return torch.cat(found, dim=2)[0]


def before_norm(target: Target, text: Sequence[int]) -> Tensor:
    """[len(text), H] what the target's final norm reads."""
    seen: list[Tensor] = []
    handle = target.model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        target.model(torch.tensor([list(text)]))
    handle.remove()
    return seen[0][0]


class Seen(NamedTuple):
    """A guess: after `text`, whose last token is pending, with paths of at most `limit` tokens."""

    text: tuple[int, ...]
    limit: int
    paths: list[tuple[int, ...]]


class Recorder(Drafter):
    """Asks an EAGLE drafter, notes what it says, and proposes something that is sometimes true."""

    runs_model = True

    def __init__(self, drafter: EagleDrafter, truths: Sequence[Sequence[int]]) -> None:
        self._drafter, self._truths, self._chance = drafter, truths, random.Random(7)
        self.taps, self.namespace, self.nodes = drafter.taps, drafter.namespace, drafter.nodes
        self.texts: dict[int, list[int]] = {}
        self.seen: list[Seen] = []

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        self.texts[row] = list(cached)
        self._drafter.admit(row, cached, draft_cached)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        for row, certain in zip(rows, tokens, strict=True):
            self.texts[row].extend(certain)
        self._drafter.observe(rows, tokens, features)

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: object = None,
    ) -> Proposed:  # fmt: skip
        draft = drafted(self._drafter, rows, pending, limits, sampling)
        check_draft(draft, pending, limits, max(self.slots(limit) for limit in limits))
        guesses = []
        for i, (row, root, limit) in enumerate(zip(rows, pending, limits, strict=True)):
            text = [*self.texts[row], root]
            self.seen.append(Seen(tuple(text), limit, tree_paths(draft, i)))
            guesses.append(self._half_true(future(self._truths, text, limit)))
        return Proposed(guesses)

    def _half_true(self, tokens: list[int]) -> Guess:
        wrong = self._chance.randrange(2 * DEPTH)
        return chain([(token + 1) % VOCAB if i == wrong else token for i, token in enumerate(tokens)])

    def release(self, row: int) -> None:
        del self.texts[row]
        self._drafter.release(row)

    def slots(self, limit: int) -> int:
        return self._drafter.slots(limit)

    def cached_tokens(self, row: int) -> int:
        return self._drafter.cached_tokens(row)

    def catch_up(self, rows: Sequence[int]) -> None:
        self._drafter.catch_up(rows)


def expected_tree(
    reference: Reference, text: Sequence[int], features: Tensor, limit: int, branches: int, budget: int
) -> set[tuple[int, ...]]:
    """The paths that EAGLE-2 keeps: the best `branches` of a level are expanded, the best `budget` of all stay."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(limit):
        grown: dict[tuple[int, ...], float] = {}
        for path in frontier:
            best = reference.after(text, features, path).topk(branches)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown[*path, int(reference.ids[index])] = scores[path] + value
        scores |= grown
        frontier = sorted(grown, key=grown.__getitem__, reverse=True)[:branches]
    kept = sorted((path for path in scores if path), key=scores.__getitem__, reverse=True)[:budget]
    return set(kept)


def check_guesses(
    target: Target, head: EagleHead, reference: Reference, drafter: EagleDrafter, seen: Sequence[Seen]
) -> None:
    """Every recorded guess is what the whole sequence says."""
    known: dict[tuple[int, ...], Tensor] = {}
    for text, limit, paths in sorted(seen, key=lambda each: -len(each.text)):
        whole = next((longer for longer in known if longer[: len(text)] == text), text)
        if whole not in known:
            known[whole] = features_of(target, whole, head)
        features = known[whole][: len(text) - 1]  # a feature knows nothing of later tokens
        if drafter.branches == 1:
            path: tuple[int, ...] = ()
            for _ in range(limit):
                best = int(reference.after(text, features, path).argmax())
                path = (*path, int(reference.ids[best]))
            assert paths == [path[: n + 1] for n in range(limit)], (text, paths)
        else:
            budget = drafter.nodes_of(limit)
            assert set(paths) == expected_tree(reference, text, features, limit, drafter.branches, budget)


HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1},
    "eagle1 norms bias": {"version": 1, "fc_bias": True, "input_norm": True, "last_norm": True},
    "eagle1 two layers": {"version": 1, "layers": 2, "kv_heads": 2},
    "eagle3": {},
    "eagle3 reduced": {"draft_vocab_size": 40},
    "eagle3 narrow": {"size": 48, "own_embed": True, "draft_vocab_size": 50},
    "eagle3 residual": {"norm_before_residual": True, "taps": (1, 0)},
    "eagle3 one norm": {"norm_before_fc": True, "bias": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "taps": (0,), "qk_norm": True},
    "eagle3.1 layers windows": {
        "fc_norm": True, "norm_output": True, "layers": 3, "windows": (7, None, 3), "norm_before_residual": True,
    },
    "eagle3 target's head": {"own_head": False},
}  # fmt: skip


def fresh(target: Target, **options: Any) -> tuple[EagleHead, Reference]:
    """A packed random head and its oracle."""
    head = EagleHead(eagle_config(shape_of(target.directory), **options), torch.float32)
    random_weights(head)
    weights = weights_of(head)
    pack(head)
    embed, output = target.model.get_input_embeddings().weight.detach(), target.model.lm_head.weight.detach()
    return head, Reference(head, weights, embed, output)


def recorded(
    llm: LLM, texts: Sequence[list[int]], params: SamplingParams = GREEDY
) -> tuple[Recorder, EagleDrafter, list[Plan]]:
    """What an engine's head says while the texts are completed together; outputs are checked on the way."""
    expected = [alone(llm, text, params) for text in texts]
    plans = watch(llm)
    drafter = llm.engine.drafters[llm.method]
    assert isinstance(drafter, EagleDrafter)
    recorder = Recorder(drafter, [e.prompt_token_ids + e.token_ids for e in expected])
    llm.engine.drafters[llm.method] = recorder
    got = llm.generate(texts, params)
    assert [said(g) for g in got] == [said(e) for e in expected]
    accepted = sum(torch.tensor(g.speculation.accepted_lengths + [0] * DEPTH)[: DEPTH + 1] for g in got)
    assert isinstance(accepted, Tensor)
    assert len(texts) == 1 or accepted.count_nonzero() == DEPTH + 1, "not every path length was accepted"
    llm.engine.drafters[llm.method] = drafter
    check_idle(llm.engine)
    return recorder, drafter, plans


TREES = ("eagle1", "eagle3 reduced", "eagle3.1", "eagle3.1 layers windows")


@pytest.mark.cover
@pytest.mark.parametrize(("name", "branches"), [(name, 1) for name in HEADS] + [(name, 3) for name in TREES])
def test_guesses_are_those_of_the_whole_sequence(target: Target, name: str, branches: int) -> None:
    head, reference = fresh(target, **HEADS[name])
    llm = llm_with(target.directory, head, tree_top_k=branches, max_total_draft_tokens=7 if branches > 1 else None)
    recorder, drafter, _ = recorded(llm, prompts(4))
    check_guesses(target, head, reference, drafter, recorder.seen[:: 1 if branches == 1 else 5])


@pytest.mark.cover
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("setting", ["pieces", "preempted", "reused"])
def test_guesses_after_what_befalls_a_row(target: Target, version: int, setting: str) -> None:
    head, reference = fresh(target, version=version)
    options: dict[str, Any] = {}
    if setting == "pieces":
        options = {"max_num_tokens": 16, "max_mixed_prefill_tokens": 3}
    if setting == "preempted":
        options = {"max_seq_len": 72, "cache": {"max_tokens": 120}}
    llm = llm_with(target.directory, head, **options)
    texts = prompts(6)
    if setting == "reused":
        start = prompts(3)[2]
        recorded(llm, [start])
        # The same again, one that parts at the end of a page, one within, and one longer.
        texts = [start, [*start[: 2 * PAGE], 99, 98, 97], [*start[: 2 * PAGE + 3], 96], [*start, 5, 6]]
    recorder, drafter, plans = recorded(llm, texts)
    assert len(recorder.seen) > 20
    assert any(plan.preempted for plan in plans) == (setting == "preempted")
    check_guesses(target, head, reference, drafter, recorder.seen)


def test_pages_are_reused_as_far_as_the_head_has_been_there(target: Target) -> None:
    head, _ = fresh(target)
    llm = llm_with(target.directory, head)
    start = prompts(3)[2]
    llm.generate(start, GREEDY)
    parts = {
        "the same": (start, len(start) - 1),
        # The slot before the fork read the token after it, and the feature for another is gone.
        "at a page": ([*start[: 2 * PAGE], 99, 98], PAGE),
        "within": ([*start[: 2 * PAGE + 3], 99], 2 * PAGE),
    }
    for text, shared in parts.values():
        assert llm.generate(text, GREEDY)[0].cached_tokens == shared // PAGE * PAGE


def test_plain_requests_and_the_head_share_pages(target: Target) -> None:
    """A plain request's pages lack the head's keys and values; the first request that has it replaces them."""
    head, _ = fresh(target)
    llm = llm_with(target.directory, head)
    text = prompts(3)[2]
    alone(llm, text, GREEDY)
    cached = [llm.generate(text, GREEDY)[0].cached_tokens for _ in range(2)]
    assert cached == [0, (len(text) - 1) // PAGE * PAGE]
    assert alone(llm, text, GREEDY).cached_tokens == cached[1]
    check_idle(llm.engine)


@pytest.mark.parametrize("version", [1, 3])
def test_long_backlogs_are_read_unasked(target: Target, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that decodes plainly keeps few features; what it says afterwards is the same."""
    monkeypatch.setattr("sametoken.drafters.rows.MOST_KEPT", 20)
    head, reference = fresh(target, version=version)
    llm = llm_with(target.directory, head)
    drafter = llm.engine.drafters[llm.method]
    assert isinstance(drafter, EagleDrafter)
    text = [*prompts(3)[2], *prompts(8)[7]]
    raw = features_of(target, text, head) if version == 3 else before_norm(target, text)
    llm.engine.table.extend(0, range(1, 1 + len(text)))
    drafter.admit(0, [])
    for at in range(0, len(text), 3):
        drafter.observe([0], [text[at : at + 3]], raw[at : at + 3])
        assert len(drafter._rows[0].tokens) <= 20 + 3
    assert drafter.cached_tokens(0) > len(text) - 24
    greedy = llm.engine.rows.sampling(llm.make_requests(text, GREEDY))
    draft = drafted(drafter, [0], [50], [DEPTH], greedy)
    drafter.release(0)
    check_guesses(target, head, reference, drafter, [Seen((*text, 50), DEPTH, tree_paths(draft, 0))])
