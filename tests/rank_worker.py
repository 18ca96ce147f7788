"""One process of several that train together: runs of `train_tiny` one after another, as a test has written them down.

The file has a list of {"port", "output", "chosen", "differs"}: a meeting place, the settings, and what rank 1 has
otherwise. What each run ended with is written beside it, by rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from sametoken.errors import SametokenError
from training_checks import train_tiny


def main(file: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1"}  # fmt: skip
    ended = []
    for run in json.loads(file.read_text()):
        os.environ["MASTER_PORT"] = str(run["port"])
        chosen = run["chosen"] | (run["differs"] if rank else {})
        if (seconds := chosen.pop("killed_after_s", None)) is not None:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            data = Path(chosen.pop("data"))
            train_tiny(chosen.pop("target"), data, Path(run["output"]), **chosen)
            ended.append("")
        except SametokenError as error:
            ended.append(str(error))
        file.with_suffix(f".{rank}").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
