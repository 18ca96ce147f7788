"""`sametoken deploy two-node` as far as it goes without a second host; tests/distributed has both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sametoken.deploy.host import HostFacts, HostQuery, examine
from sametoken.deploy.two_node import Deployment, asked, check_hosts
from sametoken.errors import ConfigError

HERE = "127.0.0.1"
PLAN = Deployment((HERE, "192.0.2.7"), None, "embedded", None, ("embedded",), 10**9, 8355, 29500, None)
GOOD = HostFacts({"sametoken": "1.0"}, "abc", "", 2 * 10**9, ["lo", "eth0"], [])


def test_a_dry_run_prints_every_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    answer = run(
        "deploy", "two-node", "embedded", "--hosts", f"{HERE},192.0.2.7", "--interface", "eth0", "--dry-run",
        "--tp_size", "2", "--max_num_tokens", "1024", "--port", "8355", "--api-key", "k",
    )  # fmt: skip
    assert answer.code == 0
    local, remote, hostfile, mpirun, health, chat, _ = answer.out.splitlines()
    assert local.endswith("-m sametoken.deploy.host < question.json")
    assert remote.startswith("ssh -o BatchMode=yes -o ConnectTimeout=10 192.0.2.7 ")
    assert hostfile == f"printf '{HERE} slots=1\\n192.0.2.7 slots=1\\n' > hostfile"
    assert mpirun.startswith(f"MASTER_ADDR={HERE} MASTER_PORT=29500 mpirun ")
    for words in (
        "-x HF_TOKEN",
        "-x GLOO_SOCKET_IFNAME",
        "oob_tcp_if_include eth0",
        "--max-num-tokens 1024",
        "--tp-size 2",
    ):
        assert words in mpirun
    assert mpirun.count("--tp-size") == 1
    assert health == f"curl http://{HERE}:8355/health"
    assert "Paris is great because" in chat
    assert "Authorization: Bearer $SAMETOKEN_API_KEY" in chat
    assert "hf_secret" not in answer.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--hosts is None, expected the addresses of two hosts"),
        (("--hosts", HERE), "expected the addresses of two hosts: --hosts A,B"),
        (("--hosts", "192.0.2.7,192.0.2.8"), "192.0.2.7 is no address of this machine"),
        (("--hosts", f"{HERE},192.0.2.7", "--tp_size", "4"), "two hosts have 2 ranks"),
    ],
)
def test_hosts_that_cannot_be(run: Any, options: tuple[str, ...], words: str) -> None:
    answer = run("deploy", "two-node", "embedded", "--dry-run", *options)
    assert answer.code == 2
    assert words in answer.err


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
    plan = Deployment(PLAN.hosts, "eth0", *(getattr(PLAN, name) for name in list(PLAN.__dataclass_fields__)[2:]))
    check_hosts(plan, [GOOD, GOOD])
    with pytest.raises(ConfigError, match=words):
        check_hosts(plan, [GOOD, GOOD._replace(**change)])


def ssh(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ssh for this process."""
    (folder / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "ssh").chmod(0o755)
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
