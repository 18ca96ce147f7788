"""A launch as a file for `docker compose`."""

from __future__ import annotations

from typing import Any

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.plan.text import as_yaml

FOLDER = "/etc/sametoken"  # where files of a launch are in a container
HUB_CACHE = "/cache/huggingface"  # which every engine finds by HF_HOME
START_S, STOP_S = 1800, 60


def render(launch: Launch) -> str:
    """One service with its model's folders, GPUs, a probe of /health and time to finish open requests."""
    inside = launch.inside(FOLDER)
    probe = f"import urllib.request as u; u.urlopen('http://localhost:{launch.port}/health', timeout=5)"
    folders = [f"{folder}:{folder}:ro" for folder in launch.folders]
    service: dict[str, Any] = {
        "image": launch.image,
        "entrypoint": list(inside.words[:1]),
        "command": [word.replace("$", "$$") for word in inside.words[1:]],
        "ports": [f"{launch.port}:{launch.port}"],
        "environment": [f"HF_HOME={HUB_CACHE}", "HF_TOKEN", *launch.secrets],
        "volumes": [f"huggingface:{HUB_CACHE}", *folders],
        "ipc": "host",
        "restart": "unless-stopped",
        "stop_grace_period": f"{STOP_S}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", probe],
            "interval": "10s", "timeout": "6s", "retries": 3, "start_period": f"{START_S}s",
        },
    }  # fmt: skip
    if launch.files:
        service["configs"] = [{"source": _config(name), "target": f"{FOLDER}/{name}"} for name in launch.files]
    if launch.gpus:
        device = {"driver": "nvidia", "count": launch.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    document: dict[str, Any] = {"services": {launch.name: service}, "volumes": {"huggingface": {}}}
    if launch.files:
        document["configs"] = {_config(name): {"content": text} for name, text in launch.files.items()}
    return as_yaml(document)


def _config(name: str) -> str:
    return name.replace(".", "-")
