"""Process of a replica, `python -m sametoken.replicas`, started by the front with its task on standard input."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from sametoken.errors import ConfigError, SametokenError
from sametoken.replicas.process import Work, leave
from sametoken.server.logs import configure


def main() -> int:
    """Run the process; return its exit code."""
    work: Work = pickle.load(sys.stdin.buffer)
    # Other output must not precede the one line for which the front waits.
    line = os.dup(1)
    os.dup2(2, 1)

    def say(**said: Any) -> None:
        os.write(line, json.dumps(said).encode() + b"\n")

    threading.Thread(target=_end_with_the_front, args=(work.socket,), daemon=True).start()
    configure(work.config.log_level, work.config.log_format, work.number)
    with socket.socket(socket.AF_UNIX) as bound:
        try:
            from sametoken.server.run import serve

            llm = work.open(work.number)
            _bind(bound, work.socket)
        except (SametokenError, ImportError) as error:
            say(error=str(error))
            return 2
        tokens = llm.engine.load.pages * llm.engine.table.page_size
        try:
            serve(llm, [bound], work.config, work.info, lambda: say(method=llm.method, cache_tokens=tokens))
        except SametokenError as error:
            print(f"error: replica {work.number}: {error}", file=sys.stderr)
            return 2
    return 0


def _bind(bound: socket.socket, path: str) -> None:
    try:
        Path(path).unlink(missing_ok=True)  # from the previous process
        bound.bind(path)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {path}: {error}; set TMPDIR to a shorter path that can be written"
        ) from error


def _end_with_the_front(socket: str) -> None:
    """End the process as soon as the front has ended."""
    while os.read(0, 1):
        pass
    leave(socket)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    # Like the command: ranks end with this process, and threads may still hold Python objects.
    for close in getattr(sys.modules.get("sametoken.parallel.lead"), "CLOSING", ()):
        close()
    sys.stderr.flush()
    os._exit(code)
