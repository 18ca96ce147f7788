"""Error messages for weight files that cannot be read."""

from __future__ import annotations

import errno
from pathlib import Path

from sametoken.checkpoint.gguf.container import AGAIN


def damaged(file: Path, error: Exception) -> str:
    """Error message for a weight file that cannot be read, with a remedy."""
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch seeks before the start of a truncated file
        return f"cannot be read ({error.strerror or error}); check its permissions, or {AGAIN}"
    with file.open("rb") as opened:
        head = opened.read(40)
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository"
    reason = str(error).splitlines()[0]
    return f"truncated or damaged ({file.stat().st_size} bytes: {reason}); {AGAIN}"
