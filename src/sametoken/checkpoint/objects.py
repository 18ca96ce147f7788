"""The JSON object in a file, or in words what is there instead; what to do about it only the caller can say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else; the message goes on after the file's name.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"({file.stat().st_size} bytes) is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, expected a JSON object")  # noqa: TRY004 - of the file
    return content
