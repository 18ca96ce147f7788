"""What stands between a server and its clients: proxies with prefixes and HTTP/1.0, connections kept open, TLS."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.errors import ConfigError
from sametoken.options.server import ServerConfig
from sametoken.server.listen import check
from server_checks import Running, running

ASKED = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "stream": True}
ROOT = "/llm/one"


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target, max_batch_size=2)


@pytest.fixture
def served(llm: LLM) -> Iterator[Running]:
    with running(llm) as server:
        yield server


def said(server: Running, sent: bytes) -> tuple[bytes, bytes]:
    """Head and body of what is answered until the server closes."""
    parts = urlsplit(server.url)
    received = b""
    with closing(socket.create_connection((parts.hostname, parts.port), 20)) as to:
        to.sendall(sent)
        while piece := to.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_to_a_client_of_http_1_0_is_not_chunked(served: Running, path: str) -> None:
    content = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "abc"}
    body = json.dumps({**content, "max_tokens": 20, "ignore_eos": True, "stream": True}).encode()
    head, answer = said(served, f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    assert head.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    *events, done, end = answer.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert all(json.loads(event.removeprefix(b"data: ")) for event in events)


@pytest.mark.parametrize("line", ["GET /v1/models", "HEAD /metrics", "GET /nowhere"])
def test_an_answer_of_known_length_is_as_it_was_for_http_1_0(served: Running, line: str) -> None:
    head, body = said(served, f"{line} HTTP/1.0\r\n\r\n".encode())
    length = next(int(each.split(b":")[1]) for each in head.split(b"\r\n") if each.startswith(b"content-length"))
    assert len(body) == (0 if line.startswith("HEAD") else length)


def test_curl_reads_a_stream_by_http_1_0(served: Running) -> None:
    command = [
        "curl",
        "-sS",
        "--http1.0",
        "-H",
        "Content-Type: application/json",
        "--data",
        json.dumps(ASKED),
        served.url + "/v1/completions",
    ]
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_a_connection_is_kept_for_as_long_as_was_said(llm: LLM) -> None:
    assert ServerConfig().keep_alive == 75  # longer than what proxies keep: nginx 60 s
    with running(llm, keep_alive=1.0) as server:
        parts = urlsplit(server.url)
        with closing(socket.create_connection((parts.hostname, parts.port), 20)) as to:
            for _ in range(2):
                to.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert to.recv(65536).startswith(b"HTTP/1.1 200")
                time.sleep(0.3)
            begin = time.monotonic()
            assert to.recv(65536) == b""
            assert 0.3 < time.monotonic() - begin < 10


def linked(client: httpx.Client, page: str) -> set[str]:
    """Addresses that a page links to, as a browser resolves them."""
    answer = client.get(page)
    assert answer.status_code == 200, page
    parts = [part.split('"')[0] for name in ('href="', 'src="') for part in answer.text.split(name)[1:]]
    return {urljoin(str(answer.url), part) for part in parts if not part.startswith("data:")}


@pytest.fixture(params=[ROOT, ROOT + "/"])
def below(llm: LLM, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(llm, root_path=request.param) as server:
        yield server


def test_paths_are_served_with_the_prefix_and_without(below: Running) -> None:
    for before in ("", ROOT):  # of a proxy that takes it off, and of one that does not
        assert below.get(f"{before}/v1/models").status_code == 200
        assert below.get(f"{before}/nowhere").status_code == 404
        answer = below.post(f"{before}/v1/completions", {**ASKED, "stream": False})
        assert answer.status_code == 200
    assert below.get(ROOT + "x/v1/models").status_code == 404
    assert below.get("/openapi.json").json()["servers"] == [{"url": ROOT}]


@pytest.mark.parametrize("page", ["", "/", "/docs", "/docs/"])
def test_pages_work_below_a_prefix(below: Running, page: str) -> None:
    with httpx.Client(base_url=below.url, follow_redirects=True) as client:
        found = linked(client, ROOT + page)
        assert len(found) >= 3
        for address in found:
            assert urlsplit(address).path.startswith(ROOT + "/")
            assert client.get(address).status_code == 200, address


@pytest.mark.parametrize("page", ["/", "/docs", "/docs/"])
def test_pages_are_relative_where_no_prefix_is_known(served: Running, page: str) -> None:
    with httpx.Client(base_url=served.url, follow_redirects=True) as client:
        for address in linked(client, page):
            assert client.get(address).status_code == 200, address
        assert 'href="playground/' in client.get("/").text


def test_keys_are_asked_for_below_a_prefix_too(llm: LLM) -> None:
    with running(llm, root_path=ROOT, api_key=("key",)) as server:
        assert server.get(ROOT + "/health").status_code == 200
        assert server.get(ROOT + "/v1/models").status_code == 401
        assert server.get(ROOT + "/docs").status_code == 200


@pytest.mark.parametrize("path", ["llm", "/a b", '/"><script>', "/a//b"])
def test_a_prefix_that_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"root_path.*expected a path, for example /llm"):
        ServerConfig(root_path=path)


class Certificates(NamedTuple):
    """Files in PEM: an authority, and by it a server and a client."""

    authority: str
    server: tuple[str, str]
    client: tuple[str, str]


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-keyout", ca_key, "-out", ca, "-subj", "/CN=authority")

    def signed(name: str) -> tuple[str, str]:
        own, secret = folder / f"{name}.pem", folder / f"{name}.key"
        openssl(
            "req", "-x509", *key, "-CA", ca, "-CAkey", ca_key, "-keyout", secret, "-out", own, "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
        return str(own), str(secret)

    return Certificates(str(ca), signed("server"), signed("client"))


def trusting(certificates: Certificates, own: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates.authority)
    if own is not None:
        context.load_cert_chain(*own)
    return context


def secured(certificates: Certificates, **more: Any) -> dict[str, Any]:
    own, key = certificates.server
    return {"ssl_certfile": own, "ssl_keyfile": key, **more}


def test_https_serves_streams_and_refusals(llm: LLM, certificates: Certificates) -> None:
    check(ServerConfig(**secured(certificates)))
    with running(llm, **secured(certificates)) as server:
        url = server.url.replace("http:", "https:")
        with httpx.Client(base_url=url, verify=trusting(certificates), timeout=60) as client:
            assert client.post("/v1/completions", json=ASKED).text.endswith("data: [DONE]\n\n")
            refused = client.get("/health", headers={"X-Big": "a" * 70_000})
            assert refused.status_code == 431  # over TLS nothing can be half closed
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")  # of an authority that nobody knows
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url + "/health")


def test_clients_show_a_certificate_where_one_is_wanted(llm: LLM, certificates: Certificates) -> None:
    wanted = secured(certificates, ssl_ca_certs=certificates.authority, ssl_cert_reqs=2)
    check(ServerConfig(**wanted))
    with running(llm, **wanted) as server:
        url = server.url.replace("http:", "https:") + "/health"
        assert httpx.get(url, verify=trusting(certificates, certificates.client)).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=trusting(certificates))


def test_certificates_that_cannot_be_used_are_refused_before_a_model_is_loaded(
    certificates: Certificates, tmp_path: Path, run: Any
) -> None:
    own, key = certificates.server
    locked = tmp_path / "locked.key"
    openssl("rsa", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked)
    answer = run("serve", "/nowhere", "--ssl-certfile", str(tmp_path / "no.pem"))
    assert (answer.code, "no such file" in answer.err) == (2, True)
    for pair in ((own, certificates.client[1]), (own, str(locked)), (key, key)):
        answer = run("serve", "/nowhere", "--ssl-certfile", pair[0], "--ssl-keyfile", pair[1])
        assert answer.code == 2
        assert "expected PEM files that belong together" in answer.err
    answer = run("serve", "/nowhere", "--ssl-keyfile", key)
    assert (answer.code, "go with ssl_certfile" in answer.err) == (2, True)
    answer = run("serve", "/nowhere", "--ssl-certfile", own, "--ssl-keyfile", key, "--ssl-cert-reqs", "2")
    assert (answer.code, "need ssl_ca_certs" in answer.err) == (2, True)
