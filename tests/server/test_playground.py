"""The pages at / and /docs without a browser: served to anyone, and nothing in them asks another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.server.playground import MODULES, OURS, PATHS
from server_checks import Running, running

CLOSED = ("base-uri", "form-action", "frame-ancestors")


@pytest.fixture(scope="module")
def locked(tiny_pair: Pair, one_thread: None) -> Iterator[Running]:
    with running(LLM(tiny_pair.target), api_key=["secret"]) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_served_without_a_key_and_asks_no_other_host(locked: Running, path: str) -> None:
    reply = locked.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith(("text/html", "text/css", "text/javascript"))
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "data:"
    assert set(policy) <= {"default-src", "script-src", "style-src", "connect-src", "img-src", *CLOSED}
    assert all(policy[name] == "'none'" for name in CLOSED)
    assert path not in OURS or not re.search(r"https?:|['\"(]//|\bimport\(", reply.text)


def test_what_the_pages_load_is_there_and_nothing_else_is(locked: Running) -> None:
    html = locked.get("/").text + locked.get("/docs").text
    asked = {f"/{name}" for name in re.findall(r'(?:src|href)="(?!data:)([^"]+)"', html)}
    for name in MODULES:
        script = locked.get(f"/playground/{name}.js").text
        asked |= {f"/playground/{each}" for each in re.findall(r'from "\./([^"]+)"', script)}
    assert {"/", *asked} == set(PATHS)  # / has a link to /docs
    kept = {each.name for each in files("sametoken.server.playground").iterdir()} - {"__init__.py", "__pycache__"}
    assert kept == set(OURS.values())


@pytest.mark.parametrize("path", ["/playground/", "/playground/__init__.py", "/playground/../app.py", "/docs/core.py"])
def test_no_other_file_is_served(locked: Running, path: str) -> None:
    assert locked.client.send(httpx.Request("GET", locked.url + path)).status_code in (401, 404)


def test_the_server_says_what_requests_may_choose(locked: Running) -> None:
    offers = locked.get("/server_info", headers={"Authorization": "Bearer secret"}).json()["offers"]
    expected = {
        "method": "suffix",
        "methods": ["ngram", "suffix"],
        "max_draft_len": 12,
        "max_seq_len": 128,
        "chat": True,
    }
    assert offers == expected
