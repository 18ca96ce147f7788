"""The server that published clients talk to: one process for the session, the embedded target with its EAGLE-3 head.

`make clients` brings the clients and sets SAMETOKEN_CLIENTS; without it the tests of this folder are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from clients_checks import HERE, PATIENCE_S, Served
from sametoken import embedded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is in this folder unless it was asked for."""
    if not os.environ.get("SAMETOKEN_CLIENTS"):
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="tests of published clients are run by: make clients"))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """In float32, to be compared closely with transformers; it drafts always, however busy the machine is."""
    log = tmp_path_factory.mktemp("served") / "log"
    options = ["--port", "0", "--threads", "1", "--dtype", "float32", "--no-adaptive"]
    template = ["--chat-template", str(HERE / "chat_template.jinja")]  # the target's own has no place for tools
    command = [sys.executable, "-m", "sametoken.cli", "serve", "--draft", embedded.HEAD_NAME, *options, *template]
    with log.open("w") as out, subprocess.Popen(command, stderr=out) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while "ready: " not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            url = log.read_text().split("ready: ")[1].split(",")[0]
            yield Served(url, embedded.NAME, str(embedded.TARGET))
            process.terminate()
            assert process.wait(PATIENCE_S) == 0, log.read_text()
        finally:
            process.kill()
