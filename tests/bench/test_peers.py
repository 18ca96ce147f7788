"""The parts of the peer benchmark that decide what a figure is: clocks, loads, ratios, hosts, agreement."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import throughput
from peers import chosen
from peers_engines import awq_write, cells, report
from peers_engines.cells import CELLS, GOALS, Attempt, Cell, Goal, Spread, agreement, ratio, speeds
from peers_engines.host import EngineError, Host, Hosts, Launch
from peers_engines.launches import Peers, launch
from peers_engines.llama_cpp import LlamaCpp, arguments, new_tokens, read_answer, read_events
from peers_engines.load import free_bytes, machine_seconds, process_seconds, usage
from peers_engines.protocol import Clock

from sametoken.errors import ConfigError

CELLS_AT_LOAD = throughput.cells_of("decode", ["bf16", "int8", "int4"], ["plain", "draft"])
OURS, THEIRS = Cell("sametoken", "bf16", "plain"), Cell("transformers", "bf16", "plain")


def attempt(cell: Cell, number: int, speed: float, foreign: float = 0.0) -> Attempt:
    """An attempt of two prompts at this speed, with this many foreign cores."""
    answers = [{"tokens": [1, 2], "timed_tokens": n, "seconds": n / speed, "steps": n} for n in (10, 30)]
    return Attempt(number, cell, answers, wall=2.0, foreign=2.0 * foreign)


def test_the_clock_leaves_the_first_emission_out() -> None:
    clock = Clock()
    clock.emit({0: [5, 6]})
    time.sleep(0.02)
    clock.emit({0: []})
    clock.emit({0: [7, 8, 9]})
    answer = clock.answer(4)
    assert answer["tokens"] == [[5, 6, 7, 8]]
    assert answer["timed_tokens"] == 3
    assert answer["steps"] == 1
    assert answer["seconds"] >= 0.02
    with pytest.raises(RuntimeError, match="5 tokens came, expected 6"):
        clock.answer(6)


def test_the_clock_runs_while_all_rows_decode() -> None:
    clock = Clock(2)
    clock.emit({0: [1]})
    clock.emit({0: [2], 1: [1]})  # from here
    time.sleep(0.02)
    clock.emit({0: [3], 1: [2, 3, 4]})  # to here: one row has all of its tokens
    clock.emit({0: [4]})
    answer = clock.answer(4)
    assert (answer["timed_tokens"], answer["steps"]) == (4, 1)
    assert 0.02 <= answer["seconds"] < 1
    late = Clock(2)
    late.emit({0: [1, 2]})
    late.emit({1: [1, 2]})
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        late.answer(2)


def test_tokens_that_the_server_holds_back_are_counted() -> None:
    lines = [b'data: {"tokens": [7], "tokens_predicted": 3, "stop": false}\n', b"\n", b": comment\n"]
    [event] = read_events(lines)
    assert new_tokens(event, 0) == [-1, -1, 7]
    assert new_tokens({"tokens": [], "tokens_predicted": 3}, 3) == []


def test_a_server_of_several_rows_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of three tokens each, one of them with two accepted guesses."""
    replies = {5: [(1, [8]), (3, [9, 9])], 6: [(1, [4]), (2, [4]), (3, [4])]}

    both_begun = threading.Barrier(2)

    def events(prompt: int) -> Iterator[bytes]:
        for count, tokens in replies[prompt]:
            yield b"data: " + json.dumps({"tokens": tokens, "tokens_predicted": count, "stop": False}).encode() + b"\n"
            if count == 1:
                both_begun.wait(10)
        timings = {"draft_n_accepted": 2 if prompt == 5 else 0}
        last = {"tokens": [], "tokens_predicted": 3, "stop": True, "timings": timings}
        yield b"data: " + json.dumps(last).encode() + b"\n"

    def ask(_: LlamaCpp, prompt: list[int], max_tokens: int, stream: bool) -> Any:
        assert (max_tokens, stream) == (3, True)
        return nullcontext(events(prompt[0]))

    monkeypatch.setattr(LlamaCpp, "_ask", ask)
    answer = LlamaCpp.__new__(LlamaCpp).run("draft", [[5], [6]], 3)
    assert (answer["tokens"], answer["steps"]) == ([[8, 9, 9], [4, 4, 4]], 4)


def test_work_at_load_is_the_same_for_all_engines_of_a_round() -> None:
    args = argparse.Namespace(prompt_len=5, new_tokens=7)
    decode, prompt = throughput.Work("decode", 3), throughput.Work("prompt", 11)
    asked = decode.request(0, args, 400)
    assert [len(each) for each in asked["prompts"]] == [5, 5, 5]
    assert asked == decode.request(0, args, 400) != decode.request(1, args, 400)
    assert (len(prompt.request(0, args, 400)["prompts"][0]), prompt.request(0, args, 400)["max_tokens"]) == (11, 1)
    answer = {"timed_tokens": 0, "seconds": 0.0, "steps": 0, "first_seconds": 0.5}
    assert Attempt(0, OURS, [prompt.figures(answer)]).speed == 22


def test_ours_competes_with_each_engine_at_load() -> None:
    found = {str(g.above): [str(c) for c in g.below] for g in throughput.goals(CELLS_AT_LOAD)}
    assert found["sametoken/bf16/plain"] == ["vllm/bf16/plain", "llama.cpp/bf16/plain"]
    assert len(found["sametoken/bf16/auto"]) == 4
    assert found["sametoken/int4/auto"] == ["llama.cpp/q4_0/plain", "llama.cpp/q4_0/draft"]


def test_the_servers_clock_becomes_the_same_answer() -> None:
    timings = {"predicted_n": 9, "predicted_ms": 2000.0, "prompt_ms": 500.0, "draft_n": 8, "draft_n_accepted": 6}
    answer = read_answer({"tokens": list(range(9)), "timings": timings}, 9)
    assert (answer["timed_tokens"], answer["seconds"], answer["steps"]) == (8, 2.0, 2)
    assert answer["tokens"] == [list(range(9))]
    with pytest.raises(RuntimeError, match="stopped by itself"):
        read_answer({"tokens": [1], "timings": timings}, 9)


def test_a_server_drafts_only_when_asked() -> None:
    spec = {"server": "s", "model": "m", "draft": "d", "threads": 2, "max_len": 128, "draft_len": 4}
    plain, drafted = (arguments({**spec, "mode": mode}, 1) for mode in ("plain", "draft"))
    assert "-md" not in plain
    assert drafted[drafted.index("--spec-draft-n-max") + 1] == "4"
    assert drafted[drafted.index("--spec-draft-p-min") + 1] == "0"


def test_busy_time_is_all_but_idle_and_disk() -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    assert machine_seconds("cpu  100 10 20 5000 700 1 2 3 90 0\ncpu0 1") == 136 / hertz


def test_a_process_counts_for_its_own_session_only() -> None:
    stat = "77 (a (b) c) S 1 77 42 0 -1 0 0 0 0 0 200 30 4 6 20 0 1 0"
    assert process_seconds(stat, 42) == 240 / os.sysconf("SC_CLK_TCK")
    assert process_seconds(stat, 43) == 0


def test_work_in_another_session_is_foreign() -> None:
    code = "import time\nbegin = time.process_time()\nwhile time.process_time() - begin < 0.4: pass"
    before = usage(os.getsid(0))
    subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
    # Asked as a session that no process has: then all that was used is foreign, this test's own time included.
    after = usage(0)
    assert after.foreign_since(before._replace(session=after.session)) >= 0.3
    assert free_bytes() > 0


def test_speed_is_over_all_prompts() -> None:
    one = Attempt(0, OURS, [{"timed_tokens": 10, "seconds": 1.0, "steps": 5}], 1, 0)
    one.answers.append({"timed_tokens": 10, "seconds": 4.0, "steps": 10})
    assert one.speed == 4.0
    assert one.acceptance_length == pytest.approx(20 / 15)


def test_loaded_attempts_are_left_out_unless_nothing_else_is_left() -> None:
    some = [attempt(OURS, 0, 10), attempt(OURS, 1, 2, foreign=0.9), attempt(OURS, 2, 12)]
    assert speeds(some)[OURS] == pytest.approx(Spread(11, 10, 12, 2, 3, False))
    none = [attempt(OURS, 0, 10, foreign=0.16), attempt(OURS, 1, 2, foreign=0.9)]
    assert speeds(none)[OURS] == pytest.approx(Spread(6, 2, 10, 2, 2, True))


def test_ratios_are_taken_within_a_round() -> None:
    goal = Goal(OURS, (THEIRS,), 2.0)
    drifting = [attempt(OURS, 0, 20), attempt(THEIRS, 0, 10), attempt(OURS, 1, 6), attempt(THEIRS, 1, 3)]
    assert ratio(goal, drifting) == pytest.approx(Spread(2, 2, 2, 2, 2, False))
    # One side under load spoils the round; a round without one side gives nothing.
    spoiled = [*drifting, attempt(OURS, 2, 20), attempt(THEIRS, 2, 1, foreign=1), attempt(OURS, 3, 50)]
    assert ratio(goal, spoiled) == pytest.approx(Spread(2, 2, 2, 2, 3, False))
    assert ratio(goal, [attempt(OURS, 0, 20)]) is None


def test_the_best_of_the_others_is_chosen_in_each_round() -> None:
    other = Cell("llama.cpp", "bf16", "plain")
    goal = Goal(OURS, (THEIRS, other), 1.0)
    attempts = [attempt(OURS, 0, 12), attempt(THEIRS, 0, 3), attempt(other, 0, 6)]
    attempts += [attempt(OURS, 1, 12), attempt(THEIRS, 1, 4)]
    assert ratio(goal, attempts) == pytest.approx(Spread(2.5, 2, 3, 2, 2, False))


def test_agreement_counts_equal_prompts() -> None:
    drafted = Cell("transformers", "bf16", "draft")
    texts = {OURS: [[1, 2], [3, 4]], THEIRS: [[1, 2], [3, 5]], drafted: [[1, 2], [3, 4]]}
    assert agreement(drafted, texts) == (1, 2, 2)
    assert agreement(OURS, texts) == (None, None, 2)
    assert agreement(Cell("llama.cpp", "q8_0", "draft"), {Cell("llama.cpp", "q8_0", "draft"): [[1]]}) == (None, None, 1)


def test_every_goal_is_between_cells_that_exist() -> None:
    named = {cell for goal in GOALS for cell in (goal.above, *goal.below)}
    assert named <= set(CELLS)
    assert len(set(CELLS)) == len(CELLS)


def test_cells_are_chosen_by_engine_and_pattern() -> None:
    assert [str(c) for c in chosen("vllm", "*/bf16/draft,*/int8/*")] == ["vllm/bf16/draft"]
    assert chosen(None, "*") == list(CELLS)
    with pytest.raises(ConfigError, match="'vlm'"):
        chosen("vlm", "*")
    with pytest.raises(ConfigError, match="matches none"):
        chosen(None, "*/int3/*")


def test_an_engine_that_is_not_there_says_why(tmp_path: Path) -> None:
    peers = Peers(tmp_path, tmp_path, None, sys.executable, None, tmp_path, {})
    with pytest.raises(EngineError, match="--vllm-python"):
        launch(Cell("vllm", "bf16", "plain"), peers)
    with pytest.raises(EngineError, match="--llama-cpp"):
        launch(Cell("llama.cpp", "bf16", "plain"), peers)
    with pytest.raises(EngineError, match="build the targets"):
        launch(Cell("llama.cpp", "bf16", "plain"), peers._replace(llama_cpp=tmp_path))


CHILD = """
import os
from peers_engines.protocol import serve

class Engine:
    version = "7"

    def __init__(self, spec):
        print("noise on standard output", flush=True)
        os.system("echo noise of a program")
        if spec["mode"] == "broken":
            raise ValueError("no such model")
        self.asked = 0

    def run(self, mode, prompt, max_tokens):
        if max_tokens == 0:
            os._exit(3)
        self.asked += 1
        return {"tokens": prompt * max_tokens, "asked": self.asked}

if __name__ == "__main__":
    serve(Engine)
"""


@pytest.fixture
def launch_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches the engine above, whose module lies beside peers_engines' own."""
    package = tmp_path / "package" / "peers_engines"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "protocol.py").write_text(Path(cells.__file__).with_name("protocol.py").read_text())
    (package / "child.py").write_text(CHILD)
    monkeypatch.setattr("peers_engines.host.ROOT", package.parent)
    return lambda mode: Launch(sys.executable, "child", {"threads": 1, "mode": mode})


def becomes_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal within a few seconds."""
    stat, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 5
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_host_answers_and_sleeps_in_between(launch_child: Any, tmp_path: Path) -> None:
    host = Host(launch_child("plain"), tmp_path / "log")
    try:
        visit = host.ask({"mode": "plain", "prompt": [7], "max_tokens": 2})
        assert visit.answer == {"tokens": [7, 7], "asked": 1}
        assert visit.wall > 0
        assert becomes_stopped(host.process.pid)
        assert "noise on standard output" in (tmp_path / "log").read_text()
        assert host.ask({"mode": "plain", "prompt": [1], "max_tokens": 1}).answer["asked"] == 2
        with pytest.raises(EngineError, match="ended with code 3"):
            host.ask({"mode": "plain", "prompt": [1], "max_tokens": 0})
    finally:
        host.close()


def test_engines_end_with_a_benchmark_that_is_killed(launch_child: Any, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from peers_engines import host\n"
        f"host.ROOT = Path({str(tmp_path / 'package')!r})\n"
        f"launch = host.Launch(sys.executable, 'child', {dict(launch_child('plain').spec)!r})\n"
        f"print(host.Host(launch, Path({str(tmp_path / 'log')!r})).process.pid, flush=True); time.sleep(60)"
    )
    root = str(Path(cells.__file__).parents[1])
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}) as benchmark:
        assert benchmark.stdout is not None
        engine = Path("/proc") / benchmark.stdout.readline().decode().strip()
        assert engine.exists()
        benchmark.kill()
        deadline = time.monotonic() + 10
        while is_alive(engine) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not is_alive(engine)


def is_alive(process: Path) -> bool:
    """Whether a process runs or is stopped; one that ended may wait for its parent as a zombie."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_engine_that_cannot_be_built_gives_its_reason(launch_child: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ValueError: no such model"):
        Host(launch_child("broken"), tmp_path / "log")


def test_hosts_warm_up_once_and_close_the_last_used_for_room(
    launch_child: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path / "logs")
    request = {"mode": "plain", "prompt": [1], "max_tokens": 1}
    try:
        first = hosts.ask(("a",), launch_child("plain"), request, [request, request])
        assert first.answer["asked"] == 3
        assert hosts.ask(("a",), launch_child("plain"), request, [request]).answer["asked"] == 4
        hosts.ask(("b",), launch_child("plain"), request, [])
        room = iter([0, 10**12])
        monkeypatch.setattr("peers_engines.host.free_bytes", lambda: next(room))
        hosts.ask(("c",), launch_child("plain"), request, [])
        assert list(hosts.running) == [("a",), ("c",)]
        assert hosts.versions == {"a": "7", "b": "7", "c": "7"}
    finally:
        hosts.close()


def sample_report() -> report.Report:
    setup = {
        "target": "T", "draft": "D", "prompts": 2, "prompt_tokens": [3, 9], "max_tokens": 2, "draft_len": 4,
        "threads": 2, "versions": {"sametoken": "1"},
    }  # fmt: skip
    attempts = [attempt(OURS, 0, 20), attempt(THEIRS, 0, 10), attempt(OURS, 1, 20), attempt(THEIRS, 1, 8, foreign=1)]
    missing = Cell("vllm", "bf16", "plain")
    return report.Report(setup, (OURS, THEIRS, missing), attempts, {missing: "not installed"})


def test_the_report_names_the_model_the_ratio_and_what_is_absent() -> None:
    text = report.text(sample_report())
    assert text.count("T; draft: D") == 2
    row = next(line for line in text.splitlines() if "sametoken/bf16/plain / transformers" in line)
    assert "2.00x (2.00 to 2.00)" in row
    assert "reached" in row
    assert "- vllm/bf16/plain: not installed" in text
    assert any("transformers/bf16/plain" in line and "| 1/2 " in line for line in text.splitlines())


def test_a_goal_is_not_judged_on_loaded_attempts_alone() -> None:
    goal = GOALS[0]
    fast, slow, loaded = (
        report.verdict(goal, Spread(r, r, r, 1, 1, busy)) for r, busy in ((9, False), (0.1, False), (9, True))
    )
    assert (fast[3], slow[3], loaded[3]) == ("reached", "missed", "open: loaded")
    assert report.verdict(goal, None)[1] == "absent"


def test_all_attempts_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.write(sample_report(), tmp_path)
    written = json.loads((tmp_path / "peers.json").read_text())
    assert [a["clean"] for a in written["attempts"]] == [True, True, True, False]
    assert written["attempts"][0]["answers"][0]["tokens"] == "1 2"
    assert written["ratios"]["sametoken/bf16/plain / transformers/bf16/plain"]["kept"] == 1
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_awq_is_written_as_its_layout_has_it() -> None:
    """Read back nibble by nibble: output 8 j + ORDER[i] stands in bits 4 i of word j."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    parts = awq_write.rounded(weight)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "qweight": (256, 2), "qzeros": (2, 2), "scales": (2, 16),
    }  # fmt: skip

    def nibble(part: torch.Tensor, row: int, output: int) -> int:
        place = [0, 4, 1, 5, 2, 6, 3, 7][output % 8]
        return int(part[row, output // 8]) >> 4 * place & 15

    for output in range(16):
        for place in range(256):
            scale = float(parts["scales"][place // 128, output])
            zero = nibble(parts["qzeros"], place // 128, output)
            meant = (nibble(parts["qweight"], place, output) - zero) * scale
            assert abs(meant - float(weight[output, place])) <= 1.01 * scale, (output, place)
