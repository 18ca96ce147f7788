"""Data generation and training on a real Slurm of four nodes on this host. `make test-slurm` runs these."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from slurm_cluster import Cluster, cluster, processes_of, reason_to_skip, wait_until

from shard_checks import SERVE, SHORT, complete, words_to_shard

pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "runs")
SAMETOKEN = (sys.executable, "-m", "sametoken.cli")
SLURM = (*SAMETOKEN, "deploy", "slurm")
HOST = socket.gethostname().partition(".")[0]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def shards(slurm: Cluster, place: Path, count: int) -> Path:
    """A directory of so many shards of two conversations each."""
    slurm.run(*SAMETOKEN, *words_to_shard(place, count))
    return place / "shards"


def test_two_calls_answer_shards_0_to_39_and_40_to_79(slurm: Cluster, tmp_path: Path) -> None:
    data, answers = shards(slurm, tmp_path, 80), tmp_path / "answers"
    documented = ("sametoken", "embedded", str(data), str(answers), "/scripts/")
    with slurm.allocation("n[1-4]") as job:
        words = (job, *documented, "0", "10", "n1,n2,n3,n4", '"Be brief."')
        said = slurm.run(*SLURM, "synthesize", *words, *SHORT, *SERVE)
    assert said.stdout.splitlines() == [
        f"n{node}: shards {10 * node - 10} to {10 * node - 1}, log {answers}/logs/n{node}.log" for node in (1, 2, 3, 4)
    ]
    assert complete(answers) == list(range(40))
    assert "10 of 10 shards are done now" in (answers / "logs" / "n4.log").read_text()

    new = ("--data", str(data), "--output", str(answers), "--nodes", "4", "--start", "40", "--wait")
    said = slurm.run(*SLURM, "synthesize", "embedded", *new, *SHORT, *SERVE, "--system-prompt", "Be brief.")
    assert "is submitted" in said.stderr
    assert complete(answers) == list(range(80))
    slurm.run(*SAMETOKEN, "shard", "--combine", "--input-dir", str(answers), "--output-path", str(tmp_path / "one"))
    rows = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert sorted(int(row["conversation_id"]) for row in rows) == list(range(1, 161))
    assert all([turn["role"] for turn in row["conversations"]] == ["system", "user", "assistant"] for row in rows)

    began = time.monotonic()
    again = slurm.run(*SLURM, "synthesize", "embedded", *new, *SHORT, *SERVE, "--system-prompt", "Be brief.")
    assert again.returncode == 0
    assert "nothing is left to answer" in (answers / "logs" / "n1.log").read_text()
    assert time.monotonic() - began < 60


def test_a_node_that_dies_loses_nothing(slurm: Cluster, tmp_path: Path) -> None:
    data, answers = shards(slurm, tmp_path, 24), tmp_path / "answers"
    with slurm.allocation("n[1-2]") as job:
        words = ("--data", str(data), "--output", str(answers), "--nodes", "n1,n2", "--job", job)
        call = [*SLURM, "synthesize", "embedded", *words, "--shards", "12", *SHORT, *SERVE]
        process = subprocess.Popen(call, env=slurm.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(lambda: len([each for each in complete(answers) if each >= 12]) >= 3, lambda: "no shards")
        slurm.cut_power("n2")
        said = process.communicate(timeout=180)[0]
        assert process.returncode != 0, said
    before = complete(answers)
    assert [each for each in before if each < 12] == list(range(12)), "the other node finished its shards"
    assert len(before) < 24
    times = {number: answers.joinpath(f"output-{number:05d}-{number:05d}.jsonl").stat().st_mtime for number in before}
    slurm.start("n2")

    new = ("--data", str(data), "--output", str(answers), "--nodes", "n3,n4", "--shards", "12", "--wait")
    slurm.run(*SLURM, "synthesize", "embedded", *new, *SHORT, *SERVE)
    assert complete(answers) == list(range(24))
    for number, moment in times.items():
        assert answers.joinpath(f"output-{number:05d}-{number:05d}.jsonl").stat().st_mtime == moment
    assert f"{24 - len(before)} of {24 - len(before)} shards are done now" in (answers / "logs" / "n4.log").read_text()
    wait_until(lambda: slurm.run("sinfo", "--noheader", "--states=idle", "--format=%D").stdout.strip() == "4", str)


def test_hidden_states_and_training_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    rows = [
        {"role": "user", "content": "Hello, how are you?"}, {"role": "assistant", "content": "I am well, thank you."}
    ]  # fmt: skip
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps({"conversations": rows}) for _ in range(32)))
    prepared, head = tmp_path / "prepared", tmp_path / "head"
    two = ("--nodes", "2", "--wait")
    written = ("--data", str(data), "--output", str(prepared), "--shard-size", "64kB")
    slurm.run(*SLURM, "prepare", "embedded", *written, *two)
    for part in (0, 1):
        assert f"part {part} of 2" in (prepared / "logs" / f"{HOST}-{part}.log").read_text()
    trained = ("--data", str(prepared), "--output-dir", str(head), "--max-steps", "2", "--device", "cpu", "--port")
    slurm.run(*SLURM, "train", "embedded", *trained, str(29_437), *two)
    assert "2 steps" in (head / "logs" / f"{HOST}-0.log").read_text()
    assert (head / "logs" / f"{HOST}-1.log").exists()
    assert (head / "head" / "model.safetensors").exists()


def test_a_server_that_does_not_start_is_an_error_and_nothing_stays(slurm: Cluster, tmp_path: Path) -> None:
    data, answers = shards(slurm, tmp_path, 1), tmp_path / "answers"
    words = ("--data", str(data), "--output", str(answers), "--nodes", "n1", "--shards", "1")
    with slurm.allocation("n1") as job:
        slurm.run(*SLURM, "synthesize", "embedded", *words, "--job", job, "--serve-args", "--draft /none", expected=2)
        log = (answers / "logs" / "n1.log").read_text()
        assert "ended with exit code 2 before it answered" in log
        assert "there is no directory /none" in log
        slow = ("--serve-args", "--max-seq-len 64", "--startup-timeout", "0.1")
        slurm.run(*SLURM, "synthesize", "embedded", *words, "--job", job, *slow, expected=2)
        assert "did not answer within 0.1 s" in (answers / "logs" / "n1.log").read_text()
        wait_until(lambda: not [each for each in processes_of("n1", slurm.place) if serves(each)], str, 20)


def serves(process: int) -> bool:
    with suppress(OSError):
        return b"\0serve\0" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def test_a_job_that_is_stopped_ends_its_servers(slurm: Cluster, tmp_path: Path) -> None:
    data, answers = shards(slurm, tmp_path, 8), tmp_path / "answers"
    words = ("--data", str(data), "--output", str(answers), "--nodes", "n1", "--shards", "8")
    with slurm.allocation("n1") as job:
        call = [*SLURM, "synthesize", "embedded", *words, "--job", job, "--max-tokens", "64", *SERVE]
        process = subprocess.Popen(call, env=slurm.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        wait_until(lambda: complete(answers), lambda: "no shard")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode != 0
        wait_until(lambda: not [each for each in processes_of("n1", slurm.place) if serves(each)], str, 60)


def test_a_plan_finishes_its_streams_when_its_time_is_over(slurm: Cluster, tmp_path: Path) -> None:
    """The job ends well, and no stream is cut: the signal goes to the server, not to srun, which would kill it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ("--target", "slurm", "--port", str(port), "--method", "none", "--drain-seconds", "60")
    script = tmp_path / "job.sh"
    script.write_text(slurm.run(*SAMETOKEN, "deploy", "plan", "embedded", *words).stdout)
    environ = {**slurm.environ, "PATH": f"{Path(sys.executable).parent}:{slurm.environ['PATH']}"}
    batch = ("sbatch", "--parsable", "--nodelist=n1", f"--chdir={tmp_path}", str(script))
    job = slurm._replace(environ=environ).run(*batch).stdout.strip()
    name = re.findall("--job-name=(.*)", script.read_text())[0]
    log = tmp_path / f"{name}-{job}.log"
    wait_until(lambda: log.exists() and "answers" in log.read_text(), lambda: log.read_text() if log.exists() else "")
    asked = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as stream:
        began = stream.readline()
        slurm.run("scancel", "--batch", "--signal=TERM", job)  # as `#SBATCH --signal=B:TERM@90` does
        rest = stream.read().decode()
    assert began.startswith(b"data: {")
    assert rest.endswith("data: [DONE]\n\n"), rest[-200:]
    assert len(re.findall('"finish_reason": ?"length"', rest)) == 8, rest[-200:]

    def state() -> str:
        return slurm.run("scontrol", "show", "job", job).stdout

    wait_until(lambda: "JobState=COMPLETED" in state(), state)
    assert "ExitCode=0:0" in state()


def test_no_job_and_no_controller_are_errors(slurm: Cluster, tmp_path: Path) -> None:
    data = shards(slurm, tmp_path, 1)
    words = (*SLURM, "synthesize", "embedded", "--data", str(data), "--output", str(tmp_path / "a"), "--nodes", "n1")
    assert "job 4000 does not run" in slurm.run(*words, "--job", "4000", expected=2).stderr
    away = tmp_path / "slurm.conf"
    text = (slurm.place / "slurm.conf").read_text()
    away.write_text(re.sub(r"SlurmctldPort=\d+", "MessageTimeout=2\nSlurmctldPort=9", text))
    elsewhere = slurm._replace(environ={**slurm.environ, "SLURM_CONF": str(away)})
    assert "Slurm's controller does not answer" in elsewhere.run(*words, expected=2).stderr
    assert not (tmp_path / "a").exists()
