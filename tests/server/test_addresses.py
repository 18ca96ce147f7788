"""A server at several addresses: every one answers, and none is left behind."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.errors import ConfigError
from sametoken.options.server import ServerConfig
from sametoken.server.listen import bind, urls_of
from server_checks import running


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target)


def test_every_address_answers(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "here.sock"
    with running(llm, host=f"127.0.0.1, 127.0.0.2,{path}") as server:
        port = urlsplit(server.url).port
        for host in ("127.0.0.1", "127.0.0.2"):
            assert httpx.get(f"http://{host}:{port}/health").status_code == 200
            foreign = httpx.get(f"http://{host}:{port}/health", headers={"Host": "elsewhere.example"})
            assert foreign.status_code == 403  # all of its networks are this machine's
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://here/v1/models", headers={"Host": "localhost"}).status_code == 200
    assert not path.exists()


def test_urls_name_every_address_and_one_port(tmp_path: Path) -> None:
    config = ServerConfig(host=f"127.0.0.1,127.0.0.2,{tmp_path}/a.sock", port=0)
    with bind(config) as bound:
        port = bound[0].getsockname()[1]
        urls = f"http://127.0.0.1:{port}, http://127.0.0.2:{port}, unix:{tmp_path}/a.sock"
        assert urls_of(bound, config) == urls
    with bind(ServerConfig(uds=f"{tmp_path}/b.sock", host="127.0.0.1")) as bound:
        assert [each.family for each in bound] == [socket.AF_UNIX]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_both_protocols_have_every_interface() -> None:
    try:
        with bind(ServerConfig(host="::", port=0)):
            pass
    except ConfigError:
        pytest.skip("no IPv6")
    with bind(ServerConfig(host="0.0.0.0,::", port=0)) as bound:
        assert [each.family for each in bound] == [socket.AF_INET, socket.AF_INET6]


def test_an_address_that_is_taken_leaves_the_others_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        hosts = ServerConfig(host="127.0.0.1,127.0.0.2", port=port)
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.2 port {port}"), bind(hosts):
            pass
        with bind(ServerConfig(host="127.0.0.1", port=port)):
            pass


@pytest.mark.parametrize("host", ["", "127.0.0.1,", ",", "a,,b"])
def test_an_address_that_is_empty_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="several with commas"):
        ServerConfig(host=host)
