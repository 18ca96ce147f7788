"""Measuring an engine: the same requests plain and speculative, interleaved, compared, and what is written down."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM, SamplingParams
from sametoken.bench import run as bench_run
from sametoken.bench.drive import Pass, TimedRequest, drive
from sametoken.bench.record import Cell, Mismatch, Run, read_runs
from sametoken.bench.run import Grid, GridResult, encode_workload, measure_grid
from sametoken.bench.workloads import Workload, spell_turn
from sametoken.errors import PromptTooLongError
from sametoken.options.sampling import RequestSpeculation
from sametoken.prompts.files import PromptItem
from sametoken.prompts.sources import Conversation, as_turn

GREEDY = SamplingParams(temperature=0, max_tokens=8)
GRID = Grid([1, 3], [1], True, [1, 3], [None], [0.0], output_len=8, repeat=2, seed=5, ignore_eos=False)
PROMPTS = ("hello", "one two one two", "a", "what?")
ITEMS = tuple(PromptItem("odd" if n % 2 else "even", text) for n, text in enumerate(PROMPTS, 1))
WORKLOAD = Workload("few", "prompts", ITEMS)


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair) -> LLM:
    return LLM(
        tiny_pair.target,
        tiny_pair.draft,
        {"max_draft_len": 3},
        kv_cache={"enable_block_reuse": False},
        max_batch_size=3,
    )


def jobs_of(llm: LLM, params: SamplingParams) -> list[TimedRequest]:
    return [TimedRequest("all", llm.tokenizer.encode(text), replace(params, seed=n)) for n, text in enumerate(PROMPTS)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", ["none", "draft_target", "suffix"])
def test_a_take_is_what_generate_says(llm: LLM, batch: int, method: str) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=12, speculative=RequestSpeculation(method=method))
    jobs = jobs_of(llm, params)
    expected = llm.generate([list(job.prompt) for job in jobs], [job.params for job in jobs])
    take = drive(llm, jobs, batch)
    assert [sample.token_ids for sample in take.samples] == [one.token_ids for one in expected]
    assert max(step.rows for step in take.steps) == batch
    assert sum(step.emitted for step in take.steps) == sum(len(one.token_ids) for one in expected)
    for sample in take.samples:
        assert sum(count for _, count in sample.emissions) == len(sample.token_ids)
        assert 0 < sample.ttft <= sample.seconds <= take.seconds
    assert sum(s.draft_s + s.verify_s + s.host_s for s in take.steps) <= take.seconds
    assert not take.steps[0].decoding  # it read a prompt
    assert any(step.decoding for step in take.steps)
    assert not llm.engine.busy


def test_drafters_remember_nothing_of_earlier_takes(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=24, speculative=RequestSpeculation(method="suffix", adaptive=False))
    jobs = jobs_of(llm, params)
    first, second = (drive(llm, jobs, 1) for _ in range(2))
    assert [s.stats.accepted for s in first.samples] == [s.stats.accepted for s in second.samples]
    assert len(first.steps) == len(second.steps)


def found(measured: GridResult) -> tuple[list[Cell], list[Mismatch]]:
    assert not measured.interrupted
    return measured.cells, measured.mismatches


@pytest.mark.parametrize("takes", [1, 5, 10])
def test_an_interrupted_run_keeps_its_whole_rounds(llm: LLM, takes: int) -> None:
    """Rounds are of four variants, cells of two rounds: after 5 takes one round is whole, after 10 one cell."""
    told: list[str] = []

    def stop_after(what: str) -> None:
        told.append(what)
        if len(told) == takes:
            raise KeyboardInterrupt

    measured = measure_grid(llm, [WORKLOAD], GRID, stop_after)
    assert measured.interrupted
    rounds = [[len(variant.round_s) for variant in cell.variants] for cell in measured.cells]
    assert rounds == {1: [], 5: [[1, 1, 1, 1]], 10: [[2, 2, 2, 2]]}[takes]
    assert measured.mismatches == []


def test_cells_and_their_figures(llm: LLM) -> None:
    told: list[str] = []
    cells, mismatches = found(measure_grid(llm, [WORKLOAD], GRID, told.append))
    assert mismatches == []
    assert len(told) == GRID.takes(1) == 2 * 2 * 4
    assert [(cell.batch, cell.requests, cell.prompts) for cell in cells] == [(1, 4, 4), (3, 4, 4)]
    for cell in cells:
        assert [(v.max_draft_len, v.chosen) for v in cell.variants] == [(0, False), (1, False), (3, False), (3, True)]
        assert [bool(variant.choices) for variant in cell.variants] == [False, False, False, True]
        assert {variant.tokens for variant in cell.variants} == {cell.plain.tokens}
        for variant in cell.variants:
            ratios = [a / b for a, b in zip(cell.plain.round_s, variant.round_s, strict=True)]
            assert variant.speed_up.value == pytest.approx(math.prod(ratios) ** (1 / GRID.repeat))
            assert variant.tokens_per_second == pytest.approx(GRID.repeat * variant.tokens / sum(variant.round_s))
            share = variant.time_share
            assert share.draft + share.verify + share.host == pytest.approx(1)
            assert variant.acceptance.emitted == GRID.repeat * variant.tokens
            assert sum(c.acceptance.emitted for c in variant.categories) == variant.acceptance.emitted
            assert [c.name for c in variant.categories] == ["odd", "even"]
        assert (cell.plain.method, cell.plain.acceptance.drafted) == ("none", 0)
        assert cell.plain.speed_up.value == 1
        assert len(cell.speculative[1].acceptance.positions) == 3
        assert cell.chosen is not None
        chosen, counted = cell.chosen, cell.chosen.acceptance
        assert max(choice.draft_len for choice in chosen.choices) <= 3
        assert all((choice.expected_cost or 1.0) > 0.5 for choice in chosen.choices)
        assert any(choice.expected_cost is not None for choice in chosen.choices)
        decoding = counted.forwards - cell.requests * GRID.repeat  # all but those that read the prompts
        assert sum(counted.plain.values()) + sum(counted.drafted_by.values()) == decoding


def test_without_the_controller_only_fixed_lengths_are_measured(llm: LLM) -> None:
    cells, _ = found(measure_grid(llm, [WORKLOAD], replace(GRID, chosen=False, batches=[1], repeat=1), lambda _: None))
    assert [variant.label for variant in cells[0].variants] == ["plain", "draft_target 1", "draft_target 3"]
    assert cells[0].chosen is None


def test_trees_are_measured_beside_chains(tiny_pair: Pair) -> None:
    options = {"max_draft_len": 2, "tree_top_k": 2}
    trees = LLM(tiny_pair.target, tiny_pair.draft, options, kv_cache={"enable_block_reuse": False}, max_batch_size=1)
    grid = replace(GRID, draft_lens=[1, 2], tree_top_ks=[1, 2], batches=[1], repeat=1)
    (cell,), mismatches = found(measure_grid(trees, [WORKLOAD], grid, lambda _: None))
    assert mismatches == []
    kind = "draft_target"
    assert [each.label for each in cell.variants] == [
        "plain", f"{kind} 1", f"{kind} 2", f"{kind} 1x2", f"{kind} 2x2", f"{kind} chosen",
    ]  # fmt: skip
    assert [each.tree_top_k for each in cell.variants] == [1, 1, 1, 2, 2, 1]
    sizes = [each.acceptance.drafted / sum(each.acceptance.drafted_lengths[1:]) for each in cell.shaped]
    assert sizes[0] == 1 < sizes[1] <= 2
    assert sizes[2] == 2 < sizes[3] <= 4
    assert [each.label for each in cell.fixed] == [f"{kind} 1", f"{kind} 2"]


def test_a_batch_is_filled_with_the_same_prompts_and_other_seeds(llm: LLM) -> None:
    few = Workload("one", "prompts", WORKLOAD.items[:1])
    cells, mismatches = found(measure_grid(llm, [few], replace(GRID, batches=[3], temperatures=[1.0]), lambda _: None))
    assert (cells[0].requests, cells[0].prompts, mismatches) == (3, 1, [])


def recorded(monkeypatch: pytest.MonkeyPatch, change: Any = None) -> list[tuple[int, int]]:
    """Every take's draft length, negative where it is chosen, and output length; `change` may alter what a take of
    drafts found."""
    seen: list[tuple[int, int]] = []

    def wrapped(llm: LLM, jobs: list[TimedRequest], batch: int) -> Pass:
        params = jobs[0].params
        assert params.speculative is not None
        length = (params.speculative.max_draft_len or 0) * (-1 if params.speculative.adaptive else 1)
        seen.append((length, params.max_tokens or 0))
        take = drive(llm, jobs, batch)
        if change is not None and length:
            change(take)
        return take

    monkeypatch.setattr(bench_run, "drive", wrapped)
    return seen


def test_rounds_are_interleaved_and_begin_in_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = recorded(monkeypatch)
    few = Workload("one", "prompts", WORKLOAD.items[:1])
    measure_grid(llm, [few], replace(GRID, batches=[1], output_len=9, repeat=3), lambda _: None)
    assert seen[:4] == [(0, 8), (1, 8), (3, 8), (-3, 8)]  # warm-up
    assert [length for length, _ in seen[4:]] == [0, 1, 3, -3, 1, 3, -3, 0, 3, -3, 0, 1]


def test_a_different_token_is_found_and_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(take: Pass) -> None:
        take.samples[-1].token_ids[4] += 1

    recorded(monkeypatch, spoil)
    cells, mismatches = found(measure_grid(llm, [WORKLOAD], replace(GRID, batches=[1], draft_lens=[2]), lambda _: None))
    assert len(cells) == 1
    assert [found.chosen for found in mismatches] == [False] * GRID.repeat + [True] * GRID.repeat
    first = mismatches[0]
    assert (first.max_draft_len, first.prompt, first.position) == (2, 3, 4)
    assert first.found == (first.plain or 0) + 1


def test_a_missing_token_is_a_difference_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, lambda take: take.samples[0].token_ids.pop())
    _, mismatches = found(measure_grid(llm, [WORKLOAD], replace(GRID, batches=[1], draft_lens=[1]), lambda _: None))
    assert mismatches[0].found is None
    assert mismatches[0].plain is not None


def test_later_turns_follow_the_plain_answers(llm: LLM) -> None:
    talk = Workload("talk", "spec-bench", (PromptItem("chat", as_turn("hi"), ("and?", "so?")),))
    first, second, third = (ids for _, ids in encode_workload(llm, talk, GREEDY))
    answer = llm.generate(first, GREEDY)[0].text
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    assert second == spell_turn(llm, Conversation([*turns, {"role": "user", "content": "and?"}]))
    assert len(third) > len(second)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="lower --prompt-len or --max-tokens"):
        measure_grid(llm, [WORKLOAD], replace(GRID, prompt_lens=[llm.max_seq_len]), lambda _: None)


# --- the command


def bench(run: Any, pair: Pair, tmp_path: Path, *arguments: str) -> tuple[Run, str]:
    common = ("--limit", "2", "--output-len", "6", "--repeat", "2", "--out", str(tmp_path / "out"))
    answer = run("bench", pair.target, "--draft", pair.draft, *common, *arguments)
    assert answer.code == 0, answer.err
    return read_runs([str(tmp_path / "out")])[-1], answer.out


@pytest.mark.usefixtures("quiet")
def test_a_run_is_shown_and_written(run: Any, pair: Pair, tmp_path: Path) -> None:
    found, shown = bench(run, pair, tmp_path, "--max-draft-len", "1,2", "--batch", "1,2", "--prompt-len", "10",
                         "--temperature", "0,0.7", "--explain", "--threads", "1")  # fmt: skip
    assert [(c.temperature, c.batch, c.prompt_len, c.mean_prompt_tokens) for c in found.cells] == [
        (temperature, batch, 10, 10.0) for temperature in (0.0, 0.7) for batch in (1, 2)
    ]
    assert "token ids: equal to plain decoding in every take" in shown
    assert "Recommended:" in shown
    made = found.environment
    assert (made.device, made.dtype, made.threads, found.seed) == ("cpu", "float32", 1, 0)
    assert {"python", "torch", "transformers"} <= made.versions.keys()
    assert any("cut to their first tokens" in note for note in found.notes)
    assert any("Student's t" in note for note in found.notes)
    assert set(found.basis.values()) == {"measured"}
    assert (found.settings["method"], found.settings["batch"]) == ("draft_target", "1,2")


def test_a_difference_is_exit_code_1(run: Any, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, lambda take: take.samples[0].token_ids.reverse())
    answer = run("bench", pair.target, "--method", "ngram", "--limit", "1", "--output-len", "6", "--repeat", "1",
                 "--explain", "--out", str(tmp_path))  # fmt: skip
    assert answer.code == 1
    assert "different from plain decoding: builtin, temperature 0, batch 1, draft length 4, prompt 0" in answer.out
    assert "comes before speed" in answer.out
    assert [found.chosen for found in read_runs([str(tmp_path)])[0].mismatches] == [False, True]


def test_runs_do_not_overwrite_each_other_and_bad_files_are_named(run: Any, pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, _ = bench(run, pair, tmp_path)
    (file,) = out.glob("*.json")
    from sametoken.bench.record import write_run

    assert write_run(first, out) != file
    assert len(read_runs([str(out)])) == 2
    content = json.loads(file.read_text())
    for change, words in (
        ({"schema": "other"}, "has schema = 'other': expected 'sametoken-bench-1'"),
        ({"seed": "x"}, "has seed = 'x': expected a valid integer"),
        ({"cells": [{}]}, "has no cells.0.workload"),
        ({"more": 1}, "has more, which is unknown here"),
    ):
        file.write_text(json.dumps({**content, **change}))
        assert_refused(run("bench", "explain", str(out)), words)
    for text, words in (
        (json.dumps(content)[:100], "is damaged: no complete JSON at line 1 column 100"),
        ("", "is damaged"),
        ("[1]", "holds no run"),
    ):
        file.write_text(text)
        assert_refused(run("bench", "explain", str(out)), words)
    for place, words in ((tmp_path, "holds no bench-*.json"), (tmp_path / "none.json", "No such file")):
        answer = run("bench", "report", str(place))
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert words in answer.err


def assert_refused(answer: Any, words: str) -> None:
    """One line in our own form; pydantic's words are "Input should be", "Field required" and the like."""
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert words in answer.err
    assert "expected a file of this version's `sametoken bench --out`; measure again" in answer.err
    assert "Input" not in answer.err
    assert "required" not in answer.err


USAGE = [
    (["--max-draft-len", "0,1"], "--max-draft-len '0,1': expected whole numbers >= 1"),
    (["--max-draft-len", "1,129"], "--max-draft-len '1,129': expected whole numbers >= 1 and <= 128"),
    (["--batch", "4097"], "--batch '4097': expected whole numbers >= 1 and <= 4096"),
    (["--tree-top-k", "0"], "--tree-top-k '0': expected whole numbers >= 1"),
    (["--batch", "1,,2"], "--batch '1,,2'"),
    (["--batch", "1.5"], "--batch '1.5'"),
    (["--temperature", "-1"], "--temperature '-1': expected numbers >= 0"),
    (["--temperature", "nan"], "--temperature 'nan'"),
    (["--prompt-len", "0"], "--prompt-len '0'"),
    (["--repeat", "0"], "--repeat 0: expected at least 1"),
    (["--repeat", "1001"], "--repeat 1001: expected at most 1000"),
    (["--turns", "0"], "--turns 0"),
    (["--method", "none"], "--method none has no drafts to measure"),
    (["--method", "ngrm"], "ngrm"),
    (["--concurrency", "2"], "--concurrency is for measuring a server: give --url too"),
    (["--api-key", "x"], "--api-key is for measuring a server"),
    (["--workload", "no/such"], "--workload no/such: No such file"),
    (["--category", "chatt"], "did you mean 'chat'?"),
    (["--out", "/dev/null/x"], "--out /dev/null/x"),
    (["--prompt-len", "100", "--output-len", "100", "--method", "ngram"], "lower --prompt-len or --max-tokens"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_one_line_and_exit_code_2(run: Any, pair: Pair, arguments: list[str], words: str) -> None:
    answer = run("bench", pair.target, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.splitlines()[-1].startswith("error: ")
    assert words in answer.err


@pytest.mark.usefixtures("quiet")
def test_report_and_explain_are_commands_of_two_words(run: Any, pair: Pair, tmp_path: Path) -> None:
    bench(run, pair, tmp_path)
    bench(run, pair, tmp_path)
    answer = run("bench", "explain", str(tmp_path / "out"), "--last")
    assert (answer.code, answer.out.count("Recommended:")) == (0, 1)
    assert run("bench", "explain", str(tmp_path / "out")).out.count("Recommended:") == 2
    assert "Usage: sametoken bench report" in run("bench", "report", "--help").out
