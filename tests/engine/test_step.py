"""A step is one sentence: plan, propose, run, observe, advance, report; and its report says all that it did.

The calls are seen through recording parts. The emissions of all reports together are what the requests have, whether
the host sees every step through or captured steps run ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from engine_checks import check_idle, make_llm, prompts, save_pair
from head_checks import llm_with, make_eagle
from sametoken import LLM, SamplingParams
from sametoken.drafters.device import proposers
from sametoken.engine.captured import CapturedSteps
from sametoken.engine.report import StepReport
from sametoken.engine.request import Emission, Request
from sametoken.options.speculation import NO_DRAFT

Pair = tuple[str, str]
SENTENCE = ["plan", "propose", "run", "observe", "advance", "report"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair("llama-3", tmp_path_factory.mktemp("step"))


def capture(llm: LLM) -> LLM:
    """Lets the engine's steps run ahead of the host."""
    engine = llm.engine
    limit = engine.scheduler.max_num_tokens
    engine.captured = CapturedSteps(engine.runner, proposers(engine.drafters, NO_DRAFT), limit)
    return llm


KINDS: dict[str, Callable[[LLM], LLM]] = {"host": lambda llm: llm, "captured": capture}


def noting(said: list[str], name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        said.append(name)
        return own(*args)

    return call


def record(llm: LLM) -> tuple[list[str], list[StepReport]]:
    """The calls of all further steps, and their reports."""
    engine, said, reports = llm.engine, list[str](), list[StepReport]()
    runners = [(engine.runner, "run"), *([(engine.captured, "run")] if engine.captured is not None else [])]
    parts: list[tuple[Any, str]] = [(engine.scheduler, "plan"), (engine.drafting, "propose"), *runners]
    parts += [(engine.drafting, "observe"), (engine.scheduler, "advance"), (engine.meter, "report")]
    if engine.captured is not None:
        parts.append((engine.captured, "plan"))
    for part, name in parts:
        setattr(part, name, noting(said, name, getattr(part, name)))
    engine.reports.append(reports.append)
    return said, reports


def requests_of(llm: LLM) -> list[Request]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=17, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=range(3, 40)),
    ]
    return llm.requests(prompts(4), params)


def run(llm: LLM, requests: list[Request]) -> None:
    for request in requests:
        llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_sentence(models: Pair, kind: str) -> None:
    llm = KINDS[kind](make_llm(*models))
    said, reports = record(llm)
    run(llm, requests_of(llm))
    steps = [said[i : i + len(SENTENCE)] for i in range(0, len(said), len(SENTENCE))]
    if kind == "captured":  # a step that is the host's is planned by the scheduler after all
        said = [name for name, _ in groupby(said)]
        steps = [said[i : i + len(SENTENCE)] for i in range(0, len(said), len(SENTENCE))]
        assert any(report.plan.captured for report in reports)
    assert all(step == SENTENCE for step in steps)
    assert len(steps) == len(reports)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [None, "none", "ngram"])
def test_emissions_are_what_the_requests_have(models: Pair, kind: str, method: str | None) -> None:
    llm = KINDS[kind](make_llm(*models, method=method, max_num_tokens=30))
    _, reports = record(llm)
    requests = requests_of(llm)
    run(llm, requests)
    emissions = [emission for report in reports for emission in report.emissions]
    for request in requests:
        own = [emission for emission in emissions if emission.request is request]
        joined = own[0]
        for emission in own[1:]:
            joined = joined.then(emission)
        assert joined.token_ids == request.output_ids
        assert (joined.origins, joined.rejected) == (request.origins, request.rejected)
        assert joined.logprobs == request.logprobs
        assert (joined.drafted, joined.accepted) == (request.stats.drafted, request.stats.accepted)
        assert len(own) == request.stats.target_forwards
        assert [emission.finished for emission in own] == [False] * (len(own) - 1) + [True]
    check_idle(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_divides_the_time_and_names_the_makers(models: Pair, kind: str) -> None:
    llm = KINDS[kind](make_llm(*models))
    _, reports = record(llm)
    requests = requests_of(llm)
    run(llm, requests)
    for part, total in zip(("draft_s", "verify_s", "other_s"), llm.engine.meter.totals, strict=True):
        assert sum(getattr(report.timings, part) for report in reports) == pytest.approx(total, rel=1e-6)
        assert 0 < max(getattr(request.stats, part) for request in requests) <= total * (1 + 1e-6)
    for report in reports:
        assert len(report.makers) == len(report.plan.decode)
        for item, maker in zip(report.plan.decode, report.makers, strict=True):
            assert maker == (("draft_target",) if item.limit else ())
    made = sum(bool(maker) for report in reports for maker in report.makers)
    assert made == sum(sum(request.stats.drafted_by.values()) for request in requests) > 0


def test_drafters_are_given_a_feature_for_every_committed_token(models: Pair) -> None:
    """The runner cuts features to the accepted paths: no padding, no rejected node, no token past a stop."""
    llm = llm_with(models[0], make_eagle(models[0]), tree_top_k=2, max_total_draft_tokens=6)
    _, reports = record(llm)
    requests = requests_of(llm)
    run(llm, requests)
    # All tokens but the last one are committed, unless a draft had it as well.
    least = sum(len(request.tokens) - 1 for request in requests)
    assert least <= sum(report.features for report in reports) <= least + len(requests)


def test_steps_under_way_are_read_before_another_batch_begins(models: Pair) -> None:
    """A result that is left behind would be taken for the next batch's."""
    llm = capture(make_llm(*models, method="none"))
    engine = llm.engine
    gone = requests_of(llm)[0]
    engine.add(gone)
    while not engine.step().plan.captured:
        pass
    engine.step()
    engine.abort(gone.id)
    late = requests_of(llm)[1]
    run(llm, [late])
    assert late.output_ids == make_llm(*models, method="none").generate(prompts(2)[1], late.params)[0].token_ids


def test_an_abort_is_in_the_next_report(models: Pair) -> None:
    llm = make_llm(*models)
    first, second = requests_of(llm)[:2]
    llm.engine.add(first)
    llm.engine.add(second)
    llm.engine.step()
    llm.engine.abort(first.id)
    emissions = llm.engine.step().emissions
    assert emissions[0] == Emission.end(first)
    assert [emission.request for emission in emissions[1:]] == [second]
    llm.engine.abort(second.id)


def test_two_streams_of_one_engine_miss_nothing(models: Pair) -> None:
    """Whoever steps the engine, each stream gets its own tokens, all of them, in order."""
    llm = make_llm(*models)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = [completion.token_ids for completion in llm.generate(prompts(3)[1:], params)]
    streams = [llm.stream(prompt, params) for prompt in prompts(3)[1:]]
    got: list[list[int]] = [[], []]
    for turn in (0, 1, 0, 0, 0, 1, 1):
        got[turn] += next(streams[turn]).token_ids
    for place, stream in enumerate(streams):
        for chunk in stream:
            got[place] += chunk.token_ids
    assert got == expected
