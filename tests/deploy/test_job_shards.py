"""One machine's part of a synthesis, and the scripts of Slurm that start it, with programs that stand for the real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sametoken.deploy import shards
from sametoken.deploy.shards import ShardWork, answer_shards, done
from sametoken.errors import ConfigError, SametokenError

# Takes the words of `sametoken serve` and `sametoken synthesize`: a server with /health, and a copy of the data.
PROGRAM = """
import http.server, json, os, shutil, signal, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
if words[0] == "synthesize":
    assert value("--url").startswith("http://127.0.0.1:") and "--log-empty-conversations" in words
    shutil.copy(value("--data"), value("--output"))
    if "bad" in open(value("--data")).read():
        sys.exit(1)
    if "killer" in open(value("--data")).read():
        os.kill(int(open(os.environ["SERVER_PID"]).read()), signal.SIGKILL)
    open(value("--output"), "a").write(json.dumps({"finished": True}) + "\\n")
    sys.exit()
if "broken" in words:
    print("no such draft"); sys.exit(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *words): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open(os.environ["SERVER_PID"], "w").write(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardWork:
    """Four shards of a line each."""
    monkeypatch.setattr(shards, "PROGRAM", (sys.executable, "-c", PROGRAM))
    monkeypatch.setenv("SERVER_PID", str(tmp_path / "pid"))
    found = ShardWork(tmp_path / "data", tmp_path / "answers", ("embedded",), startup=20)
    found.data.mkdir()
    for number in range(4):
        found.shard(number).write_text('{"prompt": "Hello"}\n')
    return found


def ended(tmp_path: Path) -> bool:
    return not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_shards_are_answered_and_done_ones_are_skipped(work: ShardWork, tmp_path: Path) -> None:
    said: list[str] = []
    assert answer_shards(work, range(1, 6), said.append) == 0
    assert [done(work.answers(number)) for number in range(4)] == [False, True, True, True]
    assert said[0].endswith("train-00004-00004.jsonl is not there: 2 of 5 shards are left out")
    assert said[-1] == "3 of 3 shards are done now"
    assert ended(tmp_path)
    (tmp_path / "pid").unlink()
    assert answer_shards(work, range(1, 4), said.append) == 0
    assert said[-1] == "nothing is left to answer"
    assert not (tmp_path / "pid").exists(), "no server is started for nothing"


def test_a_shard_that_lacks_answers_is_told_and_the_next_is_answered(work: ShardWork) -> None:
    work.shard(1).write_text('{"prompt": "bad"}\n')
    assert answer_shards(work, range(3), lambda line: None) == 1
    assert [done(work.answers(number)) for number in range(3)] == [True, False, True]


def test_a_server_that_does_not_start_or_ends_is_an_error(work: ShardWork, tmp_path: Path) -> None:
    with pytest.raises(SametokenError, match=r"exit code 2 before it answered.*\n.*\nno such draft|no such draft"):
        answer_shards(work._replace(serve=("broken",)), range(2), lambda line: None)
    work.shard(0).write_text('{"prompt": "killer"}\n')
    with pytest.raises(SametokenError, match="the server ended with exit code -9"):
        answer_shards(work, range(2), lambda line: None)
    assert not work.answers(1).exists()
    assert ended(tmp_path)


def test_a_port_in_use_is_an_error(work: ShardWork) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of .* cannot be used"):
            answer_shards(work._replace(port=port), range(1), lambda line: None)


def test_a_torn_file_is_not_done(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert not done(file)
    for text, expected in (("", False), ('{"conversation_id": "1"}\n{"fin', False), ('{}\n{"finished": true}\n', True)):
        file.write_text(text)
        assert done(file) is expected


# --- the scripts of Slurm

SCONTROL = '#!/bin/bash\n[ "$2" = node ] && echo "NodeName=$3 NodeAddr=10.0.0.1 x" || echo "$3" | tr , "\\n"\n'
SRUN = """#!/bin/bash
for word; do case "$word" in --nodelist=*) nodes=${word#*=};; esac; done
echo "$nodes ${*: -2}" >> "$PLACE/calls"
[ "$nodes" != n2 ] || exit 3
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that stand for Slurm's."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prepared").mkdir()
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00040-00040.jsonl").write_text('{"prompt": "Hello"}\n')
    return tmp_path


def printed(run: Any, *words: str) -> str:
    answer = run("deploy", "slurm", *words, "--dry-run")
    assert answer.code == 0, answer.err
    return str(answer.out)


def test_nodes_take_ranges_and_the_largest_exit_code_is_the_jobs(run: Any, slurm: Path) -> None:
    documented = ("7", "vllm", "org/model", str(slurm / "data"), str(slurm / "answers"), "/scripts/", "40", "10")
    script = printed(run, "synthesize", *documented, "n1,n2,n3", '"You are helpful."')
    assert "--engine vllm" in script
    assert "--system-prompt 'You are helpful.'" in script
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        "n1: shards 40 to 49", "n2: shards 50 to 59", "n3: shards 60 to 69"
    ]  # fmt: skip
    calls = sorted((slurm / "calls").read_text().splitlines())
    assert calls == ["n1 --start 40", "n2 --start 50", "n3 --start 60"]


def test_training_meets_at_the_first_node(run: Any, slurm: Path) -> None:
    words = ("train", "embedded", "--data", "prepared", "--job", "7", "--nodes", "n1,n3", "--gpus-per-node", "8")
    script = printed(run, *words, "--lr", "1e-5")
    assert "--nproc-per-node=8" in script
    assert '--nnodes="${#nodes[@]}"' in script
    assert '--master-addr="$first" --master-port=29400' in script
    assert "--lr 1e-05" in script
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 0
    assert (slurm / "calls").read_text().startswith("n1,n3 ")


def test_directives_of_a_new_job(run: Any, slurm: Path) -> None:
    words = ("prepare", "embedded", "--data", "a.jsonl", "--output", "prepared", "--nodes", "4")
    script = printed(run, *words, "--sbatch-args", "-A account -t 120", "--srun-args=--container-image=x")
    assert {"#SBATCH --nodes=4", "#SBATCH --requeue", "#SBATCH -A account -t 120"} <= set(script.splitlines())
    assert "srun --overlap --container-image=x --nodes=" in script
    assert '--shard "$SLURM_PROCID/$SLURM_NTASKS"' in script


def test_a_path_is_a_path(run: Any, slurm: Path) -> None:
    """Nothing in the name of a folder is run, in the script or in its first lines."""
    folder = slurm / "a b$(touch run)"
    words = ("--data", str(slurm / "data"), "--output", str(folder), "--job", "7", "--nodes", "n1,n3", "--start", "40")
    for command in ("synthesize", "prepare"):
        script = printed(run, command, "embedded", *words[: None if command == "synthesize" else -2])
        assert f'#SBATCH --output="{folder}/logs/%x-%j.log"' in script.splitlines()
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=slurm)
        assert f"{folder}/logs" in done.stdout
    assert not (slurm / "run").exists()
    for name in ("it's", 'a"', "50%", "a\nb"):
        answer = run("deploy", "slurm", "prepare", "embedded", *words[:3], str(slurm / name), *words[4:8], "--dry-run")
        assert answer.code == 2
        assert "special for Slurm" in answer.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--nodes is missing"),
        (("--nodes", "n[1"), "expected names such as"),
        (("--nodes", "99999999999999"), "expected names such as"),
        (("1", "vllm", "m", "d", "o", "s", "²", "10", "n1"), "expected a number from 0"),
        (("--nodes", "n1;ls"), "expected names such as"),
        (("--job", "x", "--nodes", "n1"), "expected the number of a job"),
        (("--job", "7"), "--nodes is missing; expected names of nodes of job 7"),
        (("--job", "7", "--nodes", "2"), "expected names of nodes of job 7"),
        (("--job", "7", "--nodes", "n1", "--wait"), "for a new job"),
        (("--nodes", "1"), "has none of the shards 0 to 9"),
        (("--nodes", "1", "--start", "40", "--engine", "vlm"), "vlm"),
        (("--nodes", "1", "--start", "40", "--srun-args", "'"), "No closing quotation"),
        (("a", "b"), "got 3 words, expected MODEL alone, or 9 or 10"),
        (("--nodes", "1", "--start", "40"), "there is no sbatch here"),
    ],
)
def test_wrong_calls_are_refused(
    run: Any, slurm: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], problem: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    files = ("--data", str(slurm / "data"), "--output", str(slurm / "answers"))
    answer = run("deploy", "slurm", "synthesize", "embedded", *words, *files)
    assert answer.code == 2
    assert problem in answer.err
    assert answer.out == ""
    assert not (slurm / "answers").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("synthesize", "embedded", "--data", "data", "--start", "40", "--output", "a.jsonl"),
            "a.jsonl is a file; expected a dir",
        ),
        (("synthesize", "embedded", "--data", "data", "--output", "o", "--shards", "1000000000"), "999999"),
        (
            ("prepare", "embedded", "--data", "a.jsonl", "--output", ""),
            "the directory to write is ''; expected --output DIR",
        ),
        (("prepare", "embedded", "--data", "none.jsonl", "--output", "o"), "--data none.jsonl: no such file"),
        (("prepare", "embedded", "--data", "a.jsonl", "--output", "a.jsonl"), "a.jsonl is a file; expected a dir"),
        (
            ("train", "embedded", "--data", "prepared", "--eval-data", "none", "--output-dir", "o"),
            "--eval-data none: no such file",
        ),
        (("train", "embedded", "--data", "prepared", "--output-dir", "a.jsonl"), "a.jsonl is a file; expected a dir"),
    ],
)
def test_files_of_a_job_are_looked_at_before_it(run: Any, slurm: Path, words: tuple[str, ...], problem: str) -> None:
    answer = run("deploy", "slurm", *words, "--nodes", "2", "--dry-run")
    assert (answer.code, answer.out) == (2, "")
    assert problem in answer.err
