"""A plugin of pytest that writes a line of JSON for each test, as soon as it is done: PEER_OUTCOMES names the file.

PEER_ONLY is a part of the ids of the tests that are run, PEER_LEFT_OUT a list of expressions of those that are not.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

_found: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    left_out = [re.compile(each, re.DOTALL) for each in json.loads(os.environ["PEER_LEFT_OUT"])]
    items[:] = [
        item for item in items
        if os.environ["PEER_ONLY"] in item.nodeid and not any(each.fullmatch(item.nodeid) for each in left_out)
    ]  # fmt: skip


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = _found.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
    row["seconds"] = round(row["seconds"] + report.duration, 1)
    if report.failed:
        row |= {"outcome": "failed", "why": str(report.longrepr)[-3000:]}
    elif report.skipped and row["outcome"] == "passed":
        row |= {"outcome": "skipped", "why": str(report.longrepr)[-300:]}
    if report.when == "teardown":
        with open(os.environ["PEER_OUTCOMES"], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
