"""Jobs of Ray where there is no Ray, or no cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sametoken.deploy.ray import RayWorkers, _fitting
from sametoken.errors import ConfigError


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "train-00000-00000.jsonl").write_text('{"prompt": "Hello"}\n')
    return ("deploy", "ray", "synthesize", "embedded", "--data", str(tmp_path), "--output", str(tmp_path / "answers"))


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("ray://head:10001", "expected HOST:PORT"), ("head", "expected HOST:PORT"),
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9: [Errno 111] Connection refused"),
    ],
)  # fmt: skip
def test_an_address_without_a_cluster(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], address: str, problem: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    answer = run(*words, "--address", address)
    assert answer.code == 2
    assert problem in answer.err


def test_no_ray(run: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answer = run(*words)
    assert answer.code == 2
    assert "pip install 'sametoken[ray]'" in answer.err


def test_workers_that_the_cluster_has_not_room_for() -> None:
    assert _fitting(RayWorkers(None, None), {"CPU": 2}, 2) == 2
    with pytest.raises(ConfigError, match="3 workers need 6 CPUs and the cluster has 5; lower --workers or --cpus"):
        _fitting(RayWorkers(None, 3, cpus=2.0), {"CPU": 5}, 2)
    with pytest.raises(ConfigError, match="2 workers need 16 GPUs and the cluster has 8"):
        _fitting(RayWorkers(None, 2, gpus=8.0), {"CPU": 64, "GPU": 8}, 2)
