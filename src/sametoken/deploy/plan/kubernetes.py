"""A launch as manifests for Kubernetes: a Deployment, its Service, and a ConfigMap where it has files."""

from __future__ import annotations

from typing import Any

from sametoken.deploy.plan.compose import FOLDER, HUB_CACHE, START_S, STOP_S
from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.plan.text import as_yaml

EVERY_S, UNROUTED_S = 10, 5  # between two probes; until no new request comes after a Pod was told to end


def render(launch: Launch) -> str:
    """The manifests, separated by `---`."""
    name = launch.name
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "inference"}
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(launch.port)}
    scraped["prometheus.io/path"] = launch.metrics
    template = {"metadata": {"labels": labels, "annotations": scraped}, "spec": _pod(launch)}
    replaced = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "strategy": replaced, "template": template},
    }  # fmt: skip
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }  # fmt: skip
    documents = [deployment, service]
    if launch.files:
        documents.insert(
            0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(launch.files)}
        )
    return as_yaml(*documents)


def _pod(launch: Launch) -> dict[str, Any]:
    inside, name = launch.inside(FOLDER), launch.name
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": EVERY_S, "timeoutSeconds": 5}
    container: dict[str, Any] = {
        "name": "server",
        "image": launch.image,
        "command": [word.replace("$(", "$$(") for word in inside.words],
        "ports": [{"name": "http", "containerPort": launch.port}],
        "env": [
            {"name": "HF_HOME", "value": HUB_CACHE},
            _secret(name, "HF_TOKEN", optional=True),
            *(_secret(name, each) for each in launch.secrets),
        ],
        "startupProbe": {**health, "failureThreshold": START_S // EVERY_S},
        "readinessProbe": {**health, "failureThreshold": 1},
        "livenessProbe": {**health, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(UNROUTED_S)]}}},
    }
    mounts: list[dict[str, Any]] = [
        {"name": "huggingface", "mountPath": HUB_CACHE},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "huggingface", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    for number, folder in enumerate(launch.folders):
        mounts.append({"name": f"model-{number}", "mountPath": folder, "readOnly": True})
        volumes.append({"name": f"model-{number}", "hostPath": {"path": folder, "type": "Directory"}})
    if launch.files:
        mounts.append({"name": "files", "mountPath": FOLDER, "readOnly": True})
        volumes.append({"name": "files", "configMap": {"name": name}})
    if launch.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": launch.gpus}}
    container["volumeMounts"] = mounts
    return {
        "securityContext": {"fsGroup": 1000},  # the user of our image, which writes to the cache
        "terminationGracePeriodSeconds": STOP_S + UNROUTED_S,
        "containers": [container],
        "volumes": volumes,
    }


def _secret(name: str, variable: str, optional: bool = False) -> dict[str, Any]:
    """A variable from the Secret of the service, whose keys are the variables."""
    reference = {"name": name, "key": variable} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}
