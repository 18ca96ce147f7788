"""The page at / without a browser: it is served, to anyone, with nothing in it that another host would be asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from cli_checks import Pair
from foretoken import LLM
from foretoken.server.playground import PATHS
from server_checks import Running, running


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
    assert not re.search(r"https?:|['\"(]//|\bimport\(", reply.text)


def test_what_the_page_loads_is_there_and_nothing_else_is(locked: Running) -> None:
    html = locked.get("/").text
    asked = {f"/{name}" for name in re.findall(r'(?:src|href)="(?!data:)([^"]+)"', html)}
    for name in ("app.js", "view.js", "answer.js", "api.js"):
        asked |= {
            f"/playground/{each}" for each in re.findall(r'from "\./([^"]+)"', locked.get(f"/playground/{name}").text)
        }
    assert {"/", *asked} == set(PATHS)
    kept = {each.name for each in files("foretoken.server.playground").iterdir()} - {"__init__.py", "__pycache__"}
    assert kept == set(PATHS.values())


@pytest.mark.parametrize("path", ["/playground/__init__.py", "/playground/../app.py", "/playground/"])
def test_no_other_file_is_served(locked: Running, path: str) -> None:
    assert locked.client.send(httpx.Request("GET", locked.url + path)).status_code in (401, 404)


def test_the_server_says_what_requests_may_choose(locked: Running) -> None:
    offers = locked.get("/server_info", headers={"Authorization": "Bearer secret"}).json()["offers"]
    assert offers == {"methods": ["ngram", "suffix"], "max_draft_len": 4, "max_seq_len": 128, "chat": True}
