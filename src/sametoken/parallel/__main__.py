"""Entry point of a rank that rank 0 starts on its own host: `python -m sametoken.parallel RANK COUNT PORT`."""

from __future__ import annotations

import os
import sys

import torch

from sametoken.parallel.follow import follow
from sametoken.parallel.place import HERE, RankPlace


def main() -> None:
    """Run the rank until it ends."""
    rank, count, port = map(int, sys.argv[1:])
    torch.set_num_threads(int(os.environ["SAMETOKEN_RANK_THREADS"]))
    code = follow(RankPlace(rank, count, 1, HERE, port))
    os._exit(code)  # threads of gloo may still hold Python objects


if __name__ == "__main__":
    main()
