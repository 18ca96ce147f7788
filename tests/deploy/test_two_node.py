"""`sametoken deploy two-node` as far as it goes without a second host; tests/distributed has both."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sametoken.deploy.host import HostFacts, HostQuery, examine
from sametoken.deploy.two_node import PLACES, Deployment, asked, check_hosts, deploy
from sametoken.errors import ConfigError

HERE = "127.0.0.1"
PLAN = Deployment((HERE, "192.0.2.7"), None, "embedded", None, ("embedded",), 10**9, HERE, 8355, 29500, (), 5.0)
GOOD = HostFacts({"sametoken": "1.0"}, "abc", "", 2 * 10**9, ["lo", "eth0"], [])


def test_a_dry_run_prints_every_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name in (*PLACES, "SAMETOKEN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    answer = run(
        "deploy", "two-node", "embedded", "--hosts", f"{HERE},192.0.2.7", "--interface", "eth0", "--dry-run",
        "--tp_size", "2", "--max_num_tokens", "1024", "--port", "8355", "--api-key", "sk-secret",
    )  # fmt: skip
    assert answer.code == 0
    question, local, _, remote, hostfile, mpirun, health, chat, _ = answer.out.splitlines()
    assert question == """printf '%s' '["embedded", null, [8355, 29500], {}]' > question.json"""
    assert local.endswith("-m sametoken.deploy.host < question.json")
    assert remote.startswith("ssh -o BatchMode=yes -o ConnectTimeout=10 192.0.2.7 ")
    assert hostfile == f"printf '{HERE} slots=1\\n192.0.2.7 slots=1\\n' > hostfile"
    assert mpirun.startswith(f"MASTER_ADDR={HERE} MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 mpirun ")
    for words in (
        "-x HF_TOKEN",
        "-x SAMETOKEN_API_KEY",
        "-x GLOO_SOCKET_IFNAME",
        "oob_tcp_if_include eth0",
        "--max-num-tokens 1024",
        "--tp-size 2",
    ):
        assert words in mpirun
    assert mpirun.count("--tp-size") == 1
    assert health == f"curl --noproxy '*' http://{HERE}:8355/health"
    assert "Paris is great because" in chat
    assert "Authorization: Bearer ${SAMETOKEN_API_KEY%%,*}" in chat
    assert "hf_secret" not in answer.out
    assert "sk-secret" not in answer.out
    assert PLAN.environment.keys() & {"SAMETOKEN_API_KEY"} == set()
    assert replace(PLAN, keys=("a", "b")).environment["SAMETOKEN_API_KEY"] == "a,b"


def test_both_ranks_get_one_key_and_no_command_line_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMETOKEN_RANK_KEY", raising=False)
    first, second = replace(PLAN, rank_key="a-secret"), Deployment(*astuple(PLAN)[:-1])
    assert len(second.rank_key) == 32
    assert second.rank_key != Deployment(*astuple(PLAN)[:-1]).rank_key
    assert first.environment["SAMETOKEN_RANK_KEY"] == "a-secret"
    assert "-x SAMETOKEN_RANK_KEY" in " ".join(first.launch("hostfile"))
    shown = [*first.commands(), *first.launch("hostfile"), *first.check(0), *first.check(1), repr(first)]
    assert "a-secret" not in " ".join(shown)
    monkeypatch.setenv("SAMETOKEN_RANK_KEY", "mine")
    assert Deployment(*astuple(PLAN)[:-1]).environment["SAMETOKEN_RANK_KEY"] == "mine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--hosts is None, expected the addresses of two hosts"),
        (("--hosts", HERE), "expected the addresses of two hosts: --hosts A,B"),
        (("--hosts", "192.0.2.7,192.0.2.8"), "192.0.2.7 is no address of this machine"),
        (("--hosts", f"{HERE},192.0.2.7", "--tp_size", "4"), "two hosts have 2 ranks"),
        (("--hosts", f"{HERE},192.0.2.7", "--port", "0"), "the port must be known before the ranks start"),
        (("--hosts", f"{HERE},192.0.2.7", "--ssl-certfile", "c.pem"), "put a proxy with HTTPS before"),
        (("--hosts", f"{HERE},192.0.2.7", "--api-key", "a,b"), "separates keys by commas"),
    ],
)
def test_hosts_that_cannot_be(run: Any, options: tuple[str, ...], words: str) -> None:
    answer = run("deploy", "two-node", "embedded", "--dry-run", *options)
    assert answer.code == 2
    assert words in answer.err


def deploying(run: Any, model: str, *more: str) -> Any:
    return run("deploy", "two-node", model, "--hosts", f"{HERE},192.0.2.7", *more)


def test_what_is_refused_before_anything_starts(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "mpirun", "exit 1", monkeypatch)
    assert "127.0.0.1 is this machine's own loopback, which 192.0.2.7 cannot reach" in deploying(run, "embedded").err
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert "there is no mpirun here; install Open MPI" in deploying(run, "embedded").err
    monkeypatch.setenv("MASTER_PORT", "many")
    assert "MASTER_PORT='many' in the environment: expected a number" in deploying(run, "embedded", "--dry-run").err


def test_the_path_of_a_model_is_absolute(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert f"serve {tmp_path}/here " in deploying(run, "here", "--dry-run").out
    assert "serve owner/name " in deploying(run, "owner/name", "--dry-run").out


@pytest.mark.parametrize(
    ("options", "listens", "asked"),
    [
        ((), f"--host {HERE}", HERE),
        (("--host", "0.0.0.0"), "--host 0.0.0.0", HERE),
        (("--host", "192.0.2.9"), "--host 192.0.2.9", "192.0.2.9"),
        (("--host", "fd00::1"), "--host fd00::1", "[fd00::1]"),
    ],
)
def test_the_server_is_asked_where_it_listens(run: Any, options: tuple[str, ...], listens: str, asked: str) -> None:
    out = deploying(run, "embedded", "--dry-run", *options).out
    assert out.count(listens) == out.count("--host ") == 1
    assert f"curl --noproxy '*' http://{asked}:8000/health\n" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": "no such model"}, "192.0.2.7 has no usable embedded: no such model"),
        ({"taken": [8355]}, "port 8355 of 192.0.2.7 is taken"),
        ({"free": 10**8}, "192.0.2.7 has 0.10 GB of memory free, .* take 1.00 GB on each host; see sametoken doctor"),
        ({"facts": {"sametoken": "1.1"}}, "192.0.2.7 has sametoken 1.1 and 127.0.0.1 has 1.0; install the same"),
        ({"digest": "abd"}, "embedded has other files on 192.0.2.7 than on 127.0.0.1"),
        ({"interfaces": ["lo"]}, "192.0.2.7 has no interface eth0; expected one of lo"),
    ],
)
def test_a_host_that_cannot_take_part_is_named(change: dict[str, Any], words: str) -> None:
    plan = replace(PLAN, interface="eth0")
    check_hosts(plan, [GOOD, GOOD])
    with pytest.raises(ConfigError, match=words):
        check_hosts(plan, [GOOD, GOOD._replace(**change)])


def ssh(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ssh for this process."""
    command(folder, "ssh", script, monkeypatch)


def command(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program of that name for this process."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_host_without_a_key_for_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh(tmp_path, "echo 'Permission denied (publickey).' >&2; exit 255", monkeypatch)
    with pytest.raises(ConfigError, match=r"Permission denied \(publickey\)\..*ssh-copy-id 192.0.2.7"):
        asked(PLAN, 1)


def test_a_host_without_sametoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh(tmp_path, "echo 'No module named sametoken' >&2; exit 1", monkeypatch)
    with pytest.raises(ConfigError, match=r"No module named sametoken; install the same version"):
        asked(PLAN, 1)


def test_both_hosts_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ssh runs on this machine what the real one runs on the second host."""
    ssh(tmp_path, 'shift 5; exec sh -c "$*"', monkeypatch)
    own = asked(PLAN, 0)
    assert asked(PLAN, 1)[:3] == own[:3] == examine(HostQuery("embedded", None, [], {}))[:3]
    assert own.digest
    assert "lo" in own.interfaces
    assert json.dumps(own)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts can take part."""
    monkeypatch.setattr("sametoken.deploy.two_node.asked", lambda plan, rank: GOOD)


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize(("name", "code"), [("HUP", 129), ("INT", 130), ("TERM", 143)])
def test_a_signal_before_the_server_answers_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """mpirun is asked to end, which ends its ranks."""
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    script = f"trap 'echo ended > $OUT; exit 1' TERM; kill -{name} $PPID; while :; do sleep 0.05; done"
    command(tmp_path, "mpirun", script, monkeypatch)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which tests may run, ignores it
    try:
        assert deploy(replace(PLAN, port=9), lambda words: None) == code
    finally:
        signal.signal(signal.SIGHUP, before)
    assert out.read_text() == "ended\n"


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize(("signals", "code"), [(1, 0), (2, 3)])
def test_a_signal_to_a_server_that_answers_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, signals: int, code: int
) -> None:
    """mpirun gets SIGUSR1 for each signal, which it passes on to the ranks; SIGTERM would make it kill them."""
    script = f"""
trap 'exit 9' TERM
trap 'count=$((count + 1)); [ $count -lt {signals} ] || exit {code}' USR1
count=0 signals=0
while :; do
    sleep 0.2
    [ ! -e {tmp_path}/chatted ] || [ $signals -ge {signals} ] || {{ signals=$((signals + 1)); kill -INT $PPID; }}
done"""
    command(tmp_path, "mpirun", script, monkeypatch)
    assert deploy(replace(PLAN, port=port, drain=20), lambda words: (tmp_path / "chatted").touch()) == code


@pytest.mark.usefixtures("alike")
def test_a_job_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sametoken.deploy.two_node.END_S", 0.1)
    command(tmp_path, "mpirun", "trap '' TERM; kill -INT $PPID; while :; do sleep 0.05; done", monkeypatch)
    assert deploy(replace(PLAN, port=9, drain=0.1), lambda words: None) == 130


class Answers(BaseHTTPRequestHandler):
    """A server that is healthy and refuses every chat with the key that it got, one key late."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        if self.headers["Authorization"] == "Bearer late":
            time.sleep(0.5)
            return
        self.send_response(400)
        self.end_headers()
        self.wfile.write(f"no chat template for {self.headers['Authorization']}".encode())

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    """Where such a server listens."""
    with HTTPServer((HERE, 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("alike")
def test_a_refused_first_chat_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """The proxy of the environment, where nobody listens, is not asked."""
    monkeypatch.setenv("http_proxy", f"http://{HERE}:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    command(tmp_path, "mpirun", "sleep 1; exit 7", monkeypatch)
    said: list[str] = []
    assert deploy(replace(PLAN, port=port, keys=("k", "l")), said.append) == 7
    assert "refused the first chat (400): no chat template for Bearer k; the server goes on" in said[-1]


@pytest.mark.usefixtures("alike")
def test_a_first_chat_that_takes_too_long_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr("sametoken.deploy.two_node.CHAT_S", 0.2)
    command(tmp_path, "mpirun", "sleep 1; exit 7", monkeypatch)
    said: list[str] = []
    assert deploy(replace(PLAN, port=port, keys=("late",)), said.append) == 7
    assert said[-1].startswith(f"http://{HERE}:{port}/v1/chat/completions did not answer the first chat within 0.2 s")
