"""The files under deploy/ for Docker and Kubernetes agree with each other and with the program; no engine is needed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import containers_check
import pytest
import yaml

from sametoken.options.declaration import declared
from sametoken.options.server import ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DRAIN = declared(ServerConfig)["drain_seconds"].field.default


def test_the_manifests_are_what_the_plan_prints(run: Any) -> None:
    text = (DEPLOY / "kubernetes" / "sametoken.yaml").read_text()
    _, command, manifests = text.split("\n", 2)
    answer = run(*shlex.split(command.partition(": ")[2])[1:])
    assert answer.code == 0
    assert answer.out == manifests


def test_compose_declares_what_it_uses() -> None:
    services, here = COMPOSE["services"], DEPLOY
    assert {name for name, each in services.items() if "profiles" in each} == {"etcd", "nats"}
    assert {each["source"] for service in services.values() for each in service.get("configs", ())} == set(
        COMPOSE["configs"]
    )
    places = [each.partition(":")[0] for service in services.values() for each in service.get("volumes", ())]
    assert {place for place in places if not place.startswith(".")} == set(COMPOSE["volumes"])
    assert all((here / place).exists() for place in places if place.startswith("."))
    build = services["server"]["build"]
    assert (here / build["context"] / build["dockerfile"]).exists()
    assert float(services["server"]["stop_grace_period"].removesuffix("s")) > DRAIN


def test_prometheus_and_grafana_find_the_server() -> None:
    contents = {name: yaml.safe_load(each["content"]) for name, each in COMPOSE["configs"].items()}
    own = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,), (usual,) = contents["prometheus"]["scrape_configs"], own["scrape_configs"]
    assert job["job_name"] == usual["job_name"]  # the dashboard and the alerts ask by it
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert contents["prometheus"]["rule_files"] == own["rule_files"]
    assert contents["datasource"]["datasources"][0]["url"] == "http://prometheus:9090"


def test_the_dockerfile_s_instructions_are_read() -> None:
    found = list(containers_check.instructions(containers_check.DOCKERFILE.read_text()))
    stages = [rest.partition(" AS ")[2] for name, rest in found if name == "FROM"]
    assert stages == ["wheel", "base", "cuda", "cpu"]
    assert dict(found)["ENTRYPOINT"] == '["sametoken"]'
    assert {word for name, rest in found if name == "COPY" for word in rest.split()} >= {"--from=wheel", "/wheels"}
    allowed = re.findall(r"^!(.+)", Path(f"{containers_check.DOCKERFILE}.dockerignore").read_text(), re.M)
    assert all((containers_check.ROOT / name).exists() for name in allowed)


def test_paths_of_the_image_are_below_the_stage(tmp_path: Path) -> None:
    stage = containers_check.Stage(tmp_path, folder="/source")
    assert stage.here("pip wheel --wheel-dir /wheels . && ls /usr/wheels") == (
        f"pip wheel --wheel-dir {tmp_path}/wheels . && ls /usr/wheels"
    )
    assert stage.place(".") == tmp_path / "source" / "."


@pytest.mark.parametrize("left_out", containers_check.LEFT_OUT)
def test_what_changes_the_machine_is_left_out(left_out: str) -> None:
    runs = [
        rest for name, rest in containers_check.instructions(containers_check.DOCKERFILE.read_text()) if name == "RUN"
    ]
    assert any(each.startswith(left_out) for each in runs)
    assert all(left_out not in each for each in runs if not each.startswith(containers_check.LEFT_OUT))
