"""Signals as a request to stop, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sametoken.interrupt import Stop, stop_at_signals

LOOP = """
import sys, time
from sametoken.interrupt import stop_at_signals

with stop_at_signals("ends after this round", {repeats}) as stop:
    print("ready", flush=True)
    with {mode}:
        while not stop:
            time.sleep(0.01)
    print("kept", flush=True)
    if "linger" in sys.argv:
        time.sleep(60)
sys.exit(stop.exit_code)
"""


def started(*arguments: str, mode: str = "stop.noticed()", repeats: float = 0.0, ignored: tuple[int, ...] = ()):
    def prepare() -> None:
        for each in (signal.SIGINT, signal.SIGTERM):  # a test under nohup or in the background inherits others
            signal.signal(each, signal.SIG_IGN if each in ignored else signal.default_int_handler)
            if each not in ignored:
                signal.signal(each, signal.SIG_DFL)

    code = LOOP.format(mode=mode, repeats=repeats)
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=prepare,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_work_be_kept(number):
    child = started()
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert out == "kept\n"
    assert f"{number.name}: ends after this round; a second signal ends the process at once" in err
    assert child.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process(number):
    child = started("linger")
    child.send_signal(number)
    assert child.stdout.readline() == "kept\n"
    child.send_signal(number)
    child.communicate(timeout=10)
    assert child.returncode == -number


def test_a_signal_that_a_launcher_passes_on_is_the_same_one():
    child = started("linger", repeats=1.5)
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "kept\n"
    child.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    time.sleep(1.5)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_nothing_can_be_kept_a_signal_raises(number):
    child = started(mode="stop.at_once()")
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert out == ""
    assert "KeyboardInterrupt" in err


def test_an_ignored_signal_stays_ignored():
    child = started(ignored=(signal.SIGINT,))
    child.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=30)[0] == "kept\n"


@pytest.fixture
def not_ignored():
    """SIGINT as a program of a terminal has it; what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_error_after_a_signal_is_the_signal(not_ignored):
    """Compiled code replaces an exception that a handler raises while it calls back."""

    def called_back() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ValueError from None

    with stop_at_signals() as stop, pytest.raises(KeyboardInterrupt), stop.at_once():
        called_back()
    with stop_at_signals() as stop, pytest.raises(ValueError, match="mine"), stop.at_once():
        raise ValueError("mine")


def test_handlers_are_as_before_and_modes_nest():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with stop_at_signals() as stop:
            with stop.at_once(), stop.noticed():
                os.kill(os.getpid(), signal.SIGTERM)
                assert stop
            with pytest.raises(KeyboardInterrupt), stop.at_once():
                pass
        assert signal.getsignal(signal.SIGTERM) is mine
        assert (stop.signal, stop.exit_code) == (signal.SIGTERM, 143)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_take_no_signals():
    found: list[Stop] = []

    def work() -> None:
        with stop_at_signals() as stop:
            found.append(stop)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not found[0]
    assert found[0].exit_code == 0


def test_a_command_run_with_m_ends_with_130_where_text_was_executed(tmp_path):
    """Python 3.11 ends by SIGINT where KeyboardInterrupt passed an exec of text, unless that mark is cleared."""
    (tmp_path / "interrupted.py").write_text(
        "from sametoken.cli import _guarded\n"
        "def work():\n    exec('raise KeyboardInterrupt')\n"
        "raise SystemExit(_guarded(work, False))\n"
    )
    assert subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, check=False).returncode == 130
