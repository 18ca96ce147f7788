"""Another engine as a child of ours: it is waited for, its log is shown when it fails, and it ends with us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sametoken.deploy.start import start
from sametoken.errors import ConfigError, SametokenError

SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *words): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("file:", open(sys.argv[2]).read(), flush=True)
open(sys.argv[3], "w").write(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CALL = """
import sys
from sametoken.deploy.start import start
port, pid = int(sys.argv[1]), sys.argv[2]
words = [sys.executable, "-c", sys.argv[3], str(port), "config.yml", pid]
sys.exit(start(words, {"config.yml": "a: 1"}, port, (20, 5), lambda text: print(text, flush=True)))
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def logs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def started(port: int, tmp_path: Path) -> tuple[subprocess.Popen[str], int, str]:
    """A process that started a server, the server's number, and the path of its log."""
    call = [sys.executable, "-c", CALL, str(port), str(tmp_path / "pid"), SERVER]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    log = process.stdout.readline().strip().rpartition(" ")[2]
    assert process.stdout.readline() == f"http://127.0.0.1:{port} answers\n"
    return process, int((tmp_path / "pid").read_text()), log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_too(port: int, tmp_path: Path, number: signal.Signals) -> None:
    process, server, log = started(port, tmp_path)
    assert Path(log).read_text() == "file: a: 1\n"
    assert Path(log).parent == tmp_path
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 0
    assert not alive(server)
    assert not Path(log).exists()


def test_the_server_ends_when_its_parent_is_killed(port: int, tmp_path: Path) -> None:
    process, server, _ = started(port, tmp_path)
    process.kill()
    process.communicate()
    end = time.monotonic() + 10
    while alive(server) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(server)


def test_a_server_that_ends_shows_its_log(port: int) -> None:
    words = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(SametokenError, match=r"(?s)ended with exit code 3 before it answered; .*no such model"):
        start(words, {}, port, (20, 1), print)


def test_a_server_that_does_not_answer_is_ended(port: int) -> None:
    words = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"]
    with pytest.raises(SametokenError, match=r"(?s)/health did not answer within 1 s; .*loading"):
        start(words, {}, port, (1, 1), print)


def test_a_program_that_is_not_there(port: int) -> None:
    with pytest.raises(
        ConfigError, match="no-such-engine cannot be started: No such file or directory; install the en"
    ):
        start(["no-such-engine"], {}, port, (1, 1), print)


def test_serve_refuses_words_for_another_engine(run: Any) -> None:
    answer = run("serve", "--engine-python", "x")
    assert answer.code == 2
    assert "--engine-python is for another engine: give --engine too" in answer.err


def test_serve_needs_the_key_in_the_engine_s_variable(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    answer = run("serve", "org/model", "--engine", "vllm", "--api-key", "sk-1")
    assert answer.code == 2
    assert "vLLM reads its key from VLLM_API_KEY; export that instead" in answer.err
