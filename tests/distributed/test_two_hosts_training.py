"""Training and preparing on two hosts by torchrun: equal to one process, and each mistake is said on both at once."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_two_hosts import REASON, SAYS_S, Hosts, hosts, nobody_is_left, started
from test_two_hosts import torchruns as same_torchruns
from two_hosts import INTERFACE, Host

from server_checks import wait_until
from training_checks import log_of, train_tiny, write_conversations

__all__ = ["hosts", "nobody_is_left"]  # fixtures, of a pair of hosts for these tests

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
ROWS = {"training_seq_len": 64, "num_epochs": 9, "logging_steps": 1, "save_steps": 2, "max_steps": 4}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "mode": "eagle3",
        "taps": "0,1,2",
        "ttt_steps": 3,
        "optim": "muon",
        "fsdp": True,
        "fc_norm": False,
        "norm_output": False,
    },
    "eagle1": {"mode": "eagle1", "ttt_steps": 3, "optim": "adamw"},
    "medusa": {"mode": "medusa", "optim": "adamw"},
    "draft": {"mode": "draft", "optim": "adamw"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", count=11)


def training(target: str, data: Path, **chosen: Any) -> list[str]:
    """The command, with an output directory that each host has for itself."""
    values = {"output_dir": "OUT", "lr": 3e-3, "train_bs": 1, "gradient_accumulation_steps": 2, **ROWS, **chosen}
    spelled = [
        f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        + ("" if isinstance(value, bool) else f"={value}")
        for name, value in values.items()
    ]
    return ["sametoken", "train", target, "--data", str(data), *spelled, "--fsdp-target", "--threads", "1"]


def torchruns(hosts: Hosts, *command: str) -> list[tuple[Host, list[str]]]:
    """The command on both hosts, with what each of them calls its output directory."""
    each = same_torchruns(hosts, *command)
    return [(host, [part.replace("OUT", str(host.folder / "out")) for part in command]) for host, command in each]


def clear(hosts: Hosts) -> None:
    for host in hosts:
        shutil.rmtree(host.folder / "out", ignore_errors=True)


@pytest.mark.parametrize("kind", KINDS)
def test_two_hosts_train_what_one_process_does(pair: Any, hosts: Hosts, data: Path, tmp_path: Path, kind: str) -> None:
    """Neither host sees the other's files; what one process saved halfway, both go on from."""
    clear(hosts)
    train_tiny(pair.target, data, tmp_path, **{**ROWS, "train_bs": 4, **KINDS[kind]})
    near = 1e-3 if KINDS[kind]["optim"] == "muon" else 1e-5
    for resumed in (False, True):
        if resumed:
            clear(hosts)
            shutil.copytree(tmp_path / "checkpoint-2", hosts[0].folder / "out" / "checkpoint-2")
        with started(*torchruns(hosts, *training(pair.target, data, **KINDS[kind]))) as job:
            assert job.ends(120) == [0, 0], job.words
        out = hosts[0].folder / "out"
        assert ("going on from" in job.said[0]) is resumed
        logs = log_of(tmp_path)[2 if resumed else 0 :], log_of(out)
        for a, b in zip(*logs, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=near)
        wanted, found = (load_file(each / "checkpoint-4" / "model.safetensors") for each in (tmp_path, out))
        for name, tensor in wanted.items():
            assert (found[name] - tensor).abs().max() < (2e-3 if near == 1e-3 else 5e-5)
        assert [path.name for path in (hosts[1].folder / "out").iterdir()] == ["data"]


def test_other_options_and_other_data_are_said_on_both(pair: Any, hosts: Hosts, data: Path, tmp_path: Path) -> None:
    other = write_conversations(tmp_path / "other.jsonl", count=12)
    wrong = {
        "rank 1 has --lr 0.001 and rank 0 has 0.003": training(pair.target, data, lr=1e-3),
        "rank 1 has samples": training(pair.target, other),
        "rank 1 has files of the target": training(pair.draft, data),
    }
    for words, command in wrong.items():
        clear(hosts)
        right = torchruns(hosts, *training(pair.target, data))[0]
        with started(right, torchruns(hosts, *command)[1]) as job:
            assert 0 not in job.ends(SAYS_S), words
        assert all(words in said for said in job.said), job.words


def test_an_error_on_one_host_is_said_on_the_other(pair: Any, hosts: Hosts, data: Path) -> None:
    clear(hosts)
    right = torchruns(hosts, *training(pair.target, data))[0]
    wrong = torchruns(hosts, *training(f"{pair.target}-absent", data))[1]
    with started(right, wrong) as job:
        assert 0 not in job.ends(SAYS_S)
    assert "rank 1 of 2 has ended: " in job.said[0]
    assert f"{pair.target}-absent" in job.said[0]


def endless(pair: Any, data: Path) -> list[str]:
    chosen = {**KINDS["medusa"], "max_steps": 10**6, "num_epochs": 10**6, "save_steps": 10**6}
    return training(pair.target, data, **chosen)


def until_it_trains(host: Host) -> None:
    wait_until(lambda: (host.folder / "out" / "log.jsonl").exists() and bool(log_of(host.folder / "out")), 120)


@pytest.mark.parametrize("how", ["killed", "stopped", "unplugged"])
def test_a_host_that_is_gone_ends_the_other(pair: Any, hosts: Hosts, data: Path, how: str) -> None:
    clear(hosts)
    with started(*torchruns(hosts, *endless(pair, data))) as job:
        until_it_trains(hosts[0])
        begin = time.monotonic()
        if how == "unplugged":
            hosts[1].root(f"ip link set {INTERFACE} down")
        else:
            spared = hosts[1].processes("torch.distributed.run") if how == "stopped" else []  # nsenter stops with it
            for number in set(hosts[1].processes("sametoken.cli")).difference(spared):
                os.kill(number, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        job.processes[0].wait(SAYS_S)
        assert time.monotonic() - begin < SAYS_S
        if how == "unplugged":
            job.processes[1].wait(SAYS_S)
            hosts[1].root(f"ip link set {INTERFACE} up")
        elif how == "stopped":
            for number in hosts[1].processes("sametoken.cli"):
                os.kill(number, signal.SIGKILL)
    assert "rank 1 of 2 has given no sign of life" in job.said[0], job.words


def test_a_process_that_never_comes_is_named(pair: Any, hosts: Hosts, data: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29410"}
    command = training(pair.target, data, output_dir=str(hosts[0].folder / "out"))
    ended = hosts[0].run(*command, environment=alone, seconds=SAYS_S + 10)
    assert ended.returncode != 0
    assert "rank 1 of 2 did not come within 25 s" in ended.stderr


def test_hidden_states_of_two_hosts_are_those_of_one(pair: Any, hosts: Hosts, data: Path, tmp_path: Path) -> None:
    """On a directory that both see. What is missing of one host's part is written again, and nothing else."""
    command = ["sametoken", "prepare", pair.target, "--data", str(data), "--hidden-states", "--taps", "0,1,2"]
    command += ["--shard-size", "50kB"]
    shared, one = tmp_path / "shared", tmp_path / "one"
    with started(*torchruns(hosts, *command, "--output", str(shared))) as job:
        assert job.ends(90) == [0, 0], job.words
    shards = sorted((shared / "hidden").glob("shard-*.safetensors"))
    assert len(shards) > 3
    shards[1].with_suffix(".json").unlink()  # as if the second host had died while it wrote this one
    written = {file: file.stat().st_mtime_ns for file in shards}
    with started(*torchruns(hosts, *command, "--output", str(shared))) as job:
        assert job.ends(90) == [0, 0], job.words
    assert [file for file in shards if file.stat().st_mtime_ns != written[file]] == [shards[1]]
    done = hosts[0].run(*command, "--output", str(one))
    assert done.returncode == 0, done.stderr
    files = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    assert len(files) == 2 * len(shards) + 3
    for file in files:
        assert (shared / file).read_bytes() == (one / file).read_bytes(), file


def test_hosts_that_prepare_otherwise_are_refused(pair: Any, hosts: Hosts, data: Path, tmp_path: Path) -> None:
    command = ["sametoken", "prepare", pair.target, "--data", str(data), "--hidden-states", "--output"]
    first = torchruns(hosts, *command, str(tmp_path / "out"), "--taps", "0,1,2")[0]
    second = torchruns(hosts, *command, str(tmp_path / "out"), "--taps", "0,1,2", "--all-tokens")[1]
    with started(first, second) as job:  # which of them is first is not known; torchrun lets the other one wait
        wait_until(lambda: any(process.poll() for process in job.processes), 60)
        # It finds the other's options, or, where both write at the same moment, the other's samples.
        wait_until(lambda: any(each in job.words for each in ("found all_tokens", "samples.safetensors: found")), 5)
