"""The controller in the engine: whatever it chooses and however often it changes its mind, the tokens stay the same."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adversaries import Adversary, adversaries
from engine_checks import DEPTH, PAGE, alone, check_idle, inject, llama, make_llm, prompts, said, save_pair, watch
from sametoken import LLM, ConfigError, SamplingParams
from sametoken.commands.options import settings_of
from sametoken.control.choice import DecodingRow, RequestedDraft
from sametoken.control.worth import Time, Worth
from sametoken.drafters.padded import Guess, chain
from sametoken.engine.advice import FEW, UNUSED
from sametoken.kernels.cpu.variant import library
from sametoken.options.sampling import RequestSpeculation
from sametoken.options.speculation import SpeculativeConfig
from tiny_models import VOCAB

NODES = 12


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair("llama-3.1", tmp_path_factory.mktemp("pair"))


def sampling(temperature: float, seed: int = 0, tokens: int = 24, **speculative: Any) -> SamplingParams:
    asked = RequestSpeculation(**speculative) if speculative else None
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, logprobs=1, speculative=asked
    )


def capricious(llm: LLM, seed: int = 0) -> list[list[RequestedDraft]]:
    """Lets chance choose methods, joined or not, and length of every row in every step; returns what it chose."""
    luck, chosen = random.Random(seed), []

    def choose(rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        requested = []
        for row in rows:
            pause = (len(chosen) // 7) % 3 == 0 or luck.random() < 0.3
            limit = 0 if pause else luck.randint(0, row.limit)
            methods = tuple(luck.sample(row.methods, luck.randint(1, len(row.methods)))) if limit else ()
            siblings = luck.choice((0, limit, luck.randint(0, limit)))
            requested.append(RequestedDraft(limit, methods, "" if limit else "gain", luck.random() < 0.5, siblings))
        chosen.append(requested)
        return requested

    def worth(method: str, requests: Sequence[int], sampled: Sequence[bool]) -> Worth | None:
        if method == "padding" or luck.random() < 0.2:  # it has the former protocol, and no place for a worth
            return None
        chances = [[sorted(luck.random() for _ in range(10)) for _ in range(2)] for _ in range(luck.randint(1, 4))]
        weights, time = [luck.random() for _ in requests], Time(*(0.3 * luck.random() ** 2 for _ in range(3)))
        return Worth(chances, [[luck.random(), luck.random()] for _ in chances], sampled, weights, time)

    llm.engine.drafting.policy.choose = choose  # type: ignore[method-assign]
    llm.engine.drafting.policy.worth = worth  # type: ignore[method-assign]
    return chosen


REQUESTS = [(prompt, sampling((0.0, 0.7, 1.0)[i % 3], seed=i)) for i, prompt in enumerate(prompts(6))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("branches", [1, 3])
def test_switching_all_the_time_changes_no_token(tmp_path: Path, dtype: str, branches: int) -> None:
    """Off and on, all lengths, all methods and several at once, in a batch, beside prompts in pieces."""
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    target = llama(tmp_path / "target", **shape)
    draft = llama(tmp_path / "draft", **shape, num_hidden_layers=2)
    oracle = make_llm(target, dtype=dtype)
    expected = [alone(oracle, *request) for request in REQUESTS]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    llm = make_llm(target, draft, method="auto", adaptive=True, dtype=dtype, tree_top_k=branches, max_num_tokens=40)
    inject(llm, adversaries(truths, VOCAB, DEPTH, DEPTH * branches))
    for seed in range(2):
        chosen = capricious(llm, seed)
        got = llm.generate([p for p, _ in REQUESTS], [params for _, params in REQUESTS])
        assert [said(g) for g in got] == [said(e) for e in expected]
        used = {m for requested in chosen for each in requested for m in each.methods}
        assert used == set(llm.methods) - {"ngram"}
        assert {each.limit for requested in chosen for each in requested} == set(range(DEPTH + 1))
        assert all(sum(g.speculation.plain.values()) for g in got)
    assert sum(g.speculation.accepted for g in got) > 0
    check_idle(llm.engine)


def test_after_a_long_pause_the_draft_knows_all_that_was_said(pair: tuple[str, str]) -> None:
    """A draft equal to the target is always right, so its cache holds everything, whoever else was asked meanwhile."""
    llm = make_llm(pair[0], pair[0], adaptive=True, max_seq_len=96)
    policy = llm.engine.drafting.policy
    steps = 0

    def choose(rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        nonlocal steps
        steps += 1
        return [
            RequestedDraft(0, (), "gain") if steps % 50 < 40 or not r.limit else RequestedDraft(r.limit, r.methods)
            for r in rows
        ]

    policy.choose = choose  # type: ignore[method-assign]
    got = llm.generate(prompts(4), sampling(0.7, tokens=60))
    assert all(g.speculation.drafted == g.speculation.accepted > 0 for g in got)


def test_pages_filled_without_the_draft_are_reused_and_read_later(pair: tuple[str, str]) -> None:
    """Plain traffic and drafted traffic share their prefixes; the draft makes up for what it was not told."""
    llm = make_llm(pair[0], pair[0])
    text = prompts(3)[2]
    plain = llm.generate(text, sampling(0.0, method="none"))[0]
    assert plain.cached_tokens == 0
    for _ in range(2):
        again = llm.generate(text, sampling(0.0))[0]
        assert again.token_ids == plain.token_ids
        assert again.cached_tokens == (len(text) - 1) // PAGE * PAGE
        assert again.speculation.drafted == again.speculation.accepted > 0
    check_idle(llm.engine)


def test_rows_with_different_limits_share_a_tree_draft(pair: tuple[str, str]) -> None:
    """A short row has few slots, and the nodes of its neighbour's large tree must not spill over them."""
    llm = make_llm(*pair, tree_top_k=3, max_total_draft_tokens=NODES, cache={"max_tokens": 400})
    oracle = make_llm(*pair)
    requests = [(p, sampling(0.7, seed=i, max_draft_len=1 + i % DEPTH)) for i, p in enumerate(prompts(6))]
    plans = watch(llm)
    got = llm.generate([p for p, _ in requests], [params for _, params in requests])
    assert [said(g) for g in got] == [said(alone(oracle, *request)) for request in requests]
    assert len({item.limit for plan in plans for item in plan.decode}) == DEPTH + 1


# --- the real policy in the real engine


def zero(llm: LLM, never: int | None = None) -> None:
    """A drafter that is wrong, under the name of the draft model and with its bookkeeping.

    Args:
        never: its only guess, a token that does not come; without it, the number after its own guess.
    """
    drafter = llm.engine.drafters["draft_target"]
    propose = drafter.propose

    def wrong(*args: Any) -> Any:
        proposed = propose(*args)
        drafts = [
            Guess([(token + 1) % VOCAB if never is None else never for token in tokens], parents)
            for tokens, parents in proposed.drafts
        ]
        for row in args[0]:
            drafter._rows[row].children = {0: {}}  # type: ignore[attr-defined]
        return proposed._replace(drafts=drafts)

    drafter.propose = wrong  # type: ignore[method-assign]


def test_a_draft_that_is_always_wrong_is_given_up_and_named(
    pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(*pair, adaptive=True, cache={"enable_block_reuse": False})
    expected = make_llm(pair[0]).generate(prompts(6), sampling(0.0, tokens=48))
    zero(llm, min(set(range(VOCAB)).difference(*(g.token_ids for g in expected))))
    with caplog.at_level(logging.WARNING, "sametoken"):
        for _ in range(2):
            got = llm.generate(prompts(6), sampling(0.0, tokens=48))
            assert [said(g) for g in got] == [said(e) for e in expected]
        llm.generate(prompts(6), sampling(0.0, adaptive=False))  # until it was tried often enough to be named
    forwards = sum(g.speculation.target_forwards for g in got)
    drafted = sum(sum(g.speculation.drafted_by.values()) for g in got)
    assert drafted < 0.3 * forwards
    assert all(g.speculation.plain["gain"] > 0 for g in got)
    assert [record.message for record in caplog.records if f"0 of its first {FEW} guesses" in record.message]
    assert len(caplog.records) == 1


@pytest.mark.thorough
def test_a_draft_that_waits_is_seen_by_the_wall_and_told(
    pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is always right, but its thread sleeps for longer than that saves; processor time would not show it."""
    llm = make_llm(pair[0], method="ngram", adaptive=True, max_seq_len=112)
    text, pause = prompts(1)[0], 0.0
    truth = text + alone(llm, text, sampling(0.0, tokens=100, method="none")).token_ids

    def guess(known: list[int], limit: int) -> Any:
        time.sleep(pause)
        return chain(truth[len(known) : len(known) + limit])

    llm.engine.drafters["ngram"] = Adversary(guess, DEPTH)

    def drafted() -> float:
        """The share of forwards with a draft in one long completion."""
        done = llm.generate(text, sampling(0.0, tokens=100))[0].speculation
        assert sum(done.plain.values()) + done.drafts == done.target_forwards - 1
        return done.drafts / done.target_forwards

    assert any(drafted() > 0.8 for _ in range(20))
    with caplog.at_level(logging.INFO, "sametoken"):
        pause = 0.1
        assert any(drafted() < 0.2 and llm.engine.load.paused for _ in range(20))
        assert "drafting stopped" in caplog.text
        pause = 0.0
        assert any(drafted() > 0.8 for _ in range(40)), "drafts did not come back"


def test_fixed_and_adaptive_requests_share_a_batch(pair: tuple[str, str]) -> None:
    llm = make_llm(*pair, adaptive=True)
    zero(llm)
    params = [sampling(0.0, adaptive=False, max_draft_len=3, tokens=40), sampling(0.0, tokens=40)] * 2
    got = llm.generate(prompts(4), params)
    lengths = got[0].speculation.drafted_lengths
    assert len(lengths) == 4
    assert lengths[3] >= 35  # until the end comes near
    assert "gain" not in got[0].speculation.plain


def test_a_schedule_says_how_long_drafts_are(pair: tuple[str, str]) -> None:
    for options in ({"draft_len_schedule": {2: 4, 4: 1}}, {"max_concurrency": 2}):
        llm = LLM(
            *pair, {"max_draft_len": 4, "adaptive": False, **options}, dtype="float32", max_batch_size=8, max_seq_len=96
        )
        plans = watch(llm)
        llm.generate(prompts(6), sampling(0.0))
        allowed = {"draft_len_schedule": {1: 4, 2: 4, 3: 1, 4: 1}, "max_concurrency": {1: 4, 2: 4}}[next(iter(options))]
        for plan in plans:
            assert all(item.limit <= allowed.get(len(plan.decode), 0) for item in plan.decode)
            assert all(item.reason in ("batch", "end") for item in plan.decode if not item.limit)
        two = llm.generate(prompts(2), sampling(0.0))
        assert all(len(g.speculation.drafted_lengths) == 5 for g in two)


def test_a_threshold_ends_drafting_for_good(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(
        *pair, {"adaptive": False, "acceptance_window": 2, "acceptance_length_threshold": 0.5}, dtype="float32",
        max_batch_size=1, max_seq_len=96,
    )  # fmt: skip
    zero(llm)
    with caplog.at_level(logging.WARNING, "sametoken"):
        drafted = [llm.generate(p, sampling(0.0, tokens=16))[0].speculation for p in prompts(4)]
    assert [bool(stats.drafted) for stats in drafted] == [True, True, False, False]
    assert drafted[-1].plain == {"threshold": 15}
    assert "acceptance_length_threshold is 0.5" in caplog.text


def test_auto_takes_the_copy_where_it_is_there_and_the_model_elsewhere(pair: tuple[str, str]) -> None:
    llm = make_llm(*pair, method="auto")
    texts = prompts(4)
    truths = [texts[i] + alone(llm, texts[i], sampling(0.0)).token_ids for i in range(4)]

    def half(text: list[int], limit: int) -> Any:
        truth = next(t for t in truths if t[: len(text)] == text)
        return chain(truth[len(text) : len(text) + limit] if len(text) % 2 else [])

    llm.engine.drafters["suffix"] = Adversary(half, DEPTH)
    got = llm.generate(texts, sampling(0.0))
    assert [g.prompt_token_ids + g.token_ids for g in got] == truths
    for stats in (g.speculation for g in got):
        assert stats.method == "auto"
        assert stats.drafted_by["suffix"] > 0
        assert stats.drafted_by["draft_target"] > 0


@pytest.mark.skipif(library() is None, reason="only the compiled kernels say how clearly a guess won")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_guess_that_was_reached_had_a_chance(pair: tuple[str, str], temperature: float) -> None:
    llm = make_llm(*pair, dtype="bfloat16")
    done = llm.generate(prompts(4), replace(sampling(temperature), ignore_eos=True))
    for stats in (completion.speculation for completion in done):
        seen = stats.reliability["draft_target"]
        assert sum(seen.tried) == sum(stats.tried) > 0
        assert sum(seen.accepted) == pytest.approx(stats.accepted, abs=DEPTH)  # the last step may be cut short
        assert 0 < sum(seen.expected) <= sum(seen.tried)


def test_an_unused_draft_is_named(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(*pair, method="ngram")
    with caplog.at_level(logging.WARNING, "sametoken"):
        llm.generate([[5, 6]] * (UNUSED + 1), sampling(0.0, tokens=2))
    assert [record.message for record in caplog.records] == [
        next(r.message for r in caplog.records if "a draft is loaded for draft_target" in r.message)
    ]


def test_forgotten_requests_leave_nothing_behind(pair: tuple[str, str]) -> None:
    llm = make_llm(*pair, method="auto", adaptive=True)
    llm.generate(prompts(5), sampling(0.0))
    seen = llm.engine.drafting.policy._acceptance
    assert seen.keys() >= {("suffix",), ("draft_target",)}
    assert all(len(each) == 0 for each in seen.values())
    check_idle(llm.engine)


# --- settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_len_schedule": {4: 4}, "max_concurrency": 2}, "exclude each other"),
        ({"draft_len_schedule": {4: 2}}, "must be max_draft_len, 4"),
        ({"draft_len_schedule": {1: 4, 4: 6}}, "must be max_draft_len, 4"),
        ({"draft_len_schedule": {}}, "is empty"),
        ({"draft_len_schedule": {0: 4}}, "draft_len_schedule"),
        ({"acceptance_window": 5}, "work together"),
        ({"acceptance_length_threshold": -1.0}, "acceptance_length_threshold"),
        ({"max_concurrency": 0}, "max_concurrency"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SpeculativeConfig(**options)


def test_the_command_line_spells_a_schedule() -> None:
    def read(text: str | None) -> Any:
        return settings_of(SpeculativeConfig, {"draft_len_schedule": text})["draft_len_schedule"]

    assert read("4:4, 16:2") == read('{"4": 4, "16": 2}') == {4: 4, 16: 2}
    assert read(None) is None
    assert SpeculativeConfig(draft_len_schedule=read("4:4,16:2")).schedule == {4: 4, 16: 2}
    assert SpeculativeConfig(max_concurrency=3).schedule == {3: 4}
    for text in ("4", "4:4,4:2", "a:b", "", "4:4:4"):
        with pytest.raises(ConfigError, match="--draft-len-schedule"):
            read(text)


def test_a_request_may_fix_or_free_its_length(pair: tuple[str, str]) -> None:
    llm = make_llm(*pair, adaptive=True)

    def made(**speculative: Any) -> tuple[bool, int, tuple[str, ...]]:
        request = llm.make_requests([5], sampling(0.0, **speculative))[0]
        return request.adaptive, request.max_draft_len, request.methods

    assert made() == (True, DEPTH, ("draft_target",))
    assert made(max_draft_len=2) == (True, 2, ("draft_target",))
    assert made(max_draft_len=2, adaptive=False) == (False, 2, ("draft_target",))
    assert made(method="auto")[2] == ("suffix", "draft_target")  # n-grams guess what suffix lookup guesses too
    assert made(max_draft_len=0)[1:] == (0, ())
    assert replace(sampling(0.0), speculative=None).speculative is None


def test_what_the_end_of_a_request_takes_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as long whatever was drafted, but comes in steps that draft little, which would seem slow."""
    llm = LLM("embedded", "embedded", {"max_draft_len": 2}, max_batch_size=1, max_seq_len=64)
    drafting, seen = llm.engine.drafting, []

    def end(request: Any) -> None:
        time.sleep(1.0)

    monkeypatch.setattr(drafting, "end", end)
    monkeypatch.setattr(drafting.policy, "saw_step", lambda *step: seen.append(step[3]))
    llm.generate([[5, 6, 7]], sampling(0.0, tokens=6))
    assert len(seen) >= 2
    assert max(seen) < 0.9


@pytest.mark.thorough
def test_beside_busy_loops_at_the_start_drafts_are_left_out_for_seconds_only() -> None:
    """Four processes use the machine for 5 s while costs are measured; after 20 s more most steps draft again."""
    loop = "import time\nend = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(4)]
    try:
        llm = LLM("embedded", "embedded", {"max_draft_len": 8}, max_batch_size=1, max_seq_len=512)
        prompt = llm.render_chat([{"role": "user", "content": "Could you recommend a good film?"}])
        llm.generate([prompt], sampling(0.0, tokens=32))  # measures
    finally:
        for process in others:
            process.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        llm.generate([prompt], sampling(0.0, tokens=96))
    done = [llm.generate([prompt], sampling(0.0, tokens=96))[0].speculation for _ in range(4)]
    forwards = sum(each.target_forwards for each in done)
    assert sum(sum(each.drafted_by.values()) for each in done) > 0.6 * forwards
