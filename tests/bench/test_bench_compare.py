"""`sametoken bench compare`: ratios of speeds and their ranges, from made-up runs of which all is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_checks import cell, changed, run_of
from sametoken.bench.compare import compare
from sametoken.bench.record import Run, write_run
from sametoken.errors import ConfigError

FIRST = changed(cell([4], [0.5]), 1, tokens_per_second=100.0, round_s=[1.0, 2.0])
SECOND = changed(FIRST, 1, tokens_per_second=150.0, round_s=[1.0, 1.0])
NAME = "made-up, temperature 0, batch 1, draft_target 4"


def run_at(minute: int, *cells: Any) -> Run:
    return run_of(*cells, created=f"2026-01-01T00:0{minute}:00+0000")


def test_a_ratio_is_of_the_speeds_and_its_range_of_any_two_rounds() -> None:
    plain, drafted = compare([run_at(0, FIRST)], [run_at(1, SECOND)])
    assert (plain.ratio, plain.low, plain.high) == (1, 1, 1)
    assert (drafted.name, drafted.first, drafted.second, drafted.ratio) == (NAME, 100, 150, 1.5)
    # Rounds of the first: 150 and 75 tokens per second; of the second: 150 twice.
    assert (drafted.low, drafted.high) == (1, 2)


def test_the_newest_run_of_a_setting_counts_and_others_are_left_out() -> None:
    other = replace(FIRST, batch=4)
    found = compare([run_at(0, SECOND, other), run_at(1, FIRST)], [run_at(2, SECOND)])
    assert [each.first for each in found if each.name == NAME] == [100]
    assert not any("batch 4" in each.name for each in found)
    with pytest.raises(ConfigError, match="no setting is in both: the first has made-up, temperature 0, batch 4"):
        compare([run_at(0, other)], [run_at(1, SECOND)])


def test_the_command_prints_a_table_or_json(run: Any, tmp_path: Path) -> None:
    for name, made in (("a", FIRST), ("b", SECOND)):
        write_run(run_at(0, made), tmp_path / name)
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    answer = run("bench", "compare", *places)
    assert answer.code == 0
    assert "1.50x (1.00 to 2.00)" in answer.out
    records = [json.loads(line) for line in run("bench", "compare", *places, "--json").out.splitlines()]
    assert [record["ratio"] for record in records] == [1, 1.5]
    assert run("bench", "compare", places[0]).code == 2
