"""The page of a report stands alone, shows every figure and table, and keeps what users named from becoming markup."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_bench_explain import load

from bench_checks import cell, changed, run_of, with_controller
from sametoken.bench import plots
from sametoken.bench.figure import INK
from sametoken.bench.plots import charts
from sametoken.bench.record import RUN, read_runs, write_run
from sametoken.bench.report import write_report
from sametoken.bench.tables import tables
from sametoken.bench.variant import Expectation
from sametoken.errors import ConfigError

HALF = [0.5] * 8


def test_the_page_stands_alone(tmp_path: Path) -> None:
    loads = [load(1, 1.5), load(4, 0.9), load(1, None, "baseline"), load(4, None, "baseline")]
    engine = run_of(cell([1, 2, 4], HALF, workload="<b>x</b> & y"), cell([1, 2, 4], HALF, temperature=0.7))
    runs = [engine, run_of(kind="server", loads=loads)]
    page, *pictures = write_report(runs, tmp_path / "made" / "here")
    assert [file.stem for file in pictures] == ["speed-up", "acceptance", "time-1", "time-2", "latency-closed"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pictures)
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == len(pictures)
    # Names of XML languages are the only addresses, and nothing is fetched from elsewhere.
    outside = set(re.findall(r"https?://[\w./-]+", text))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", text)
    assert "<b>x</b>" not in text
    assert "&lt;b&gt;x&lt;/b&gt; &amp; y" in text
    assert INK not in text.partition("</style>")[2]
    assert "prefers-color-scheme: dark" in text
    for words in (
        "Speed-up over plain decoding",
        "guesses accepted by position",
        "Recommended:",
        "1.50x",
        "load average",
    ):
        assert words in text


def test_expected_acceptance_has_a_table_where_a_drafter_says_it() -> None:
    made = cell([1], HALF)
    one = made.variants[1]
    seen = [Expectation("draft_target", 0.6, 0.7, 50, 0.66, 0.64)]
    sure = changed(made, 1, acceptance=replace(one.acceptance, reliability=seen))
    titles = [[table.title for table in tables(run_of(each))] for each in (made, sure)]
    (added,) = set(titles[1]) - set(titles[0])
    (table,) = (each for each in tables(run_of(sure)) if each.title == added)
    assert table.rows == [(one.label, "draft_target", "60% to 70%", "50", "66.0%", "64.0%")]


def test_expected_acceptance_is_drawn_against_the_real_one() -> None:
    made = cell([1, 2], HALF)
    for place, seen in enumerate(
        (Expectation("head", 0.6, 0.7, 50, 0.66, 0.64), Expectation("head", 0.6, 0.7, 150, 0.62, 0.54)), 1
    ):
        made = changed(made, place, acceptance=replace(made.variants[place].acceptance, reliability=[seen]))
    found = {chart.name: chart for chart in charts([run_of(made)])}["expected"]
    words = " ".join(ElementTree.fromstring(found.svg).itertext())
    # Both variants' guesses are in one mark: 0.63 was expected and 0.565 came true.
    assert "Real acceptance differs from the expected by 0.07 on average (200 guesses)" in words
    assert "temperature 0, batch 1, head" in words
    assert "larger marks: more guesses, up to 200" in words
    assert "expected" not in [chart.name for chart in charts([run_of(cell([1], HALF))])]


def test_figures_of_one_page_share_no_ids() -> None:
    drawn = charts([run_of(cell([1, 2], HALF), cell([1, 2], HALF, temperature=0.7))])
    used: list[set[str]] = []
    for chart in drawn:
        root = ElementTree.fromstring(chart.svg)
        referred = {
            name for node in root.iter() for value in node.attrib.values() for name in re.findall(r"#(\w+)\)?$", value)
        }
        used.append({name for name in referred if not re.fullmatch(r"[0-9a-f]{6}", name)})
    assert all(used)
    assert sum(map(len, used)) == len(set().union(*used))


def test_a_figure_says_its_finding_and_where_it_is_from() -> None:
    made = run_of(cell([1, 4], HALF), settings={"model": "a-model", "draft": "a-head"})
    speed, accepted, time = (" ".join(ElementTree.fromstring(chart.svg).itertext()) for chart in charts([made]))
    busy = replace(made, environment=replace(made.environment, load_after=5.0))
    assert "2026-01-01; the machine was busy with other work (load average 5.0)" in charts([busy])[0].svg
    for text in (speed, accepted, time):
        assert "busy" not in text
        assert "a-model with a-head; a processor, 1 threads, float32; 2026-01-01" in text
        assert "temperature 0" in text
    assert re.search(r"\d\.\d\d times the speed of plain decoding, with drafts of 4 tokens", speed)
    assert "plain decoding; below it drafts cost time" in speed
    assert "The first draft token is accepted in 50% of the drafts" in accepted
    assert "dashed: share of drafts that got there" in accepted
    assert "ms per token with drafts" in time


def test_tokens_per_second_are_drawn_against_the_batch() -> None:
    sizes = {1: 1.05, 4: 0.97, 16: 1.0}
    cells = [with_controller(cell([1, 4], HALF, batch=batch), speed, {4: 9}) for batch, speed in sizes.items()]
    load, speed_up, *_ = charts([run_of(*cells)])
    assert load.name == "load"
    words = " ".join(ElementTree.fromstring(load.svg).itertext())
    assert re.search(r"The controller: at least 0\.97 of the best fixed length, 1\.\d\d of plain decoding", words)
    for line in (
        "plain decoding",
        "best fixed draft length of the batch",
        "the controller, which chooses",
        "temperature 0",
    ):
        assert line in words
    assert "chosen: the controller chooses the length of every step" in "".join(
        ElementTree.fromstring(speed_up.svg).itertext()
    )
    tree = replace(cells[0].fixed[-1], tree_top_k=2)
    speed_up = charts([run_of(replace(cells[0], variants=[*cells[0].variants, tree]))])[0]
    assert {"x2", "triangles: trees; x2: 2 branches a level"} <= set(ElementTree.fromstring(speed_up.svg).itertext())
    without = charts([run_of(*(cell([1, 4], HALF, batch=batch) for batch in sizes))])[0]
    words = " ".join(ElementTree.fromstring(without.svg).itertext())
    assert re.search(r"With drafts 1\.\d\d times as fast as plain at batch 1, 1\.\d\d times at batch 16", words)
    assert "the controller" not in words


def test_many_cells_are_spread_over_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "render", lambda name, draw, origin: ("", b""))
    drawn = charts([run_of(*(cell([1, 2], HALF, temperature=n / 10) for n in range(8)))])
    names = [chart.name for chart in drawn]
    assert len(names) == len(set(names)) == 2 * 2 + 8


def test_a_run_survives_being_written(tmp_path: Path) -> None:
    run = run_of(cell([1, 3], HALF))
    file = write_run(run, tmp_path)
    assert read_runs([str(file)]) == [run]
    assert RUN.validate_json(file.read_bytes()).cells[0].label == "made-up, temperature 0, batch 1"


def test_without_matplotlib_the_command_to_install_it_is_named(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    write_run(run_of(cell([1], HALF)), tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = run("bench", "report", str(tmp_path))
    assert answer.code == 2
    assert "pip install 'sametoken[bench]'" in answer.err


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a directory that can be written"):
        write_report([run_of(cell([1], HALF))], tmp_path / "file")
