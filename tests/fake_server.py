"""A small OpenAI-compatible server of canned answers, streamed or whole, which also misbehaves as real ones do."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Pieces of one answer; every word is a token, so a piece may hold several.
PIECES = ("one two three ", "four ", "five\u2028six ", "")
TOKENS = 6


@dataclass
class Behaviour:
    """How the server answers.

    Attributes:
        fault: "", or one of error, late_error, stall, cut, early, garbage, no_usage, empty; of whole answers error,
            busy, cut, garbage, no_key.
        faulty: how many requests show it, None for all; the rest are fine.
        continuous: counts tokens in every chunk if asked to.
        pause: seconds between pieces.
        hold: requests beyond so many wait until this is raised; None for none.
        pages: what GET answers, by path: one text after the other, and the last one again. Other paths list a model,
            unless there are pages: then they are not found.
        bodies: what was asked, in order. `running`, `most`: requests at once, now and ever.
    """

    fault: str = ""
    faulty: int | None = None
    continuous: bool = False
    pause: float = 0.0
    hold: int | None = None
    pages: dict[str, list[str]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, format: str, *args: object) -> None:
        """Keeps quiet."""

    def do_GET(self) -> None:
        if pages := self.behaviour.pages:
            self.behaviour.keys.append(self.headers.get("Authorization"))
        if texts := pages.get(self.path):
            self._send(200, (texts.pop(0) if len(texts) > 1 else texts[0]).encode())
        elif pages and self.path != "/v1/models":
            self._reply(404, {"detail": "Not Found"})
        else:
            self._reply(200, {"object": "list", "data": [{"id": "canned"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.behaviour
        with state.lock:
            state.bodies.append(body)
            state.paths.append(self.path)
            state.keys.append(self.headers.get("Authorization"))
            state.running += 1
            state.most = max(state.most, state.running)
            number = len(state.bodies)
            bad = state.faulty is None or number <= state.faulty
        try:
            while state.hold is not None and number > state.hold:
                time.sleep(0.005)
            self._answer(body, state.fault if bad else "")
        finally:
            with state.lock:
                state.running -= 1

    def _reply(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(content).encode(), headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, body: dict[str, Any], fault: str) -> None:
        if fault == "error":
            self._reply(503, {"error": {"message": "the engine is full"}})
            return
        if not body.get("stream", "stream_options" in body):
            self._answer_whole(body, fault)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if fault == "cut":
            self.send_header("Content-Length", "100000")  # promised and never sent
        self.end_headers()
        counted = self.behaviour.continuous and body["stream_options"].get("continuous_usage_stats", False)
        self._say({"choices": [{"delta": {"role": "assistant"}, "text": ""}]})
        for at, piece in enumerate(PIECES if fault != "empty" else ()):
            time.sleep(self.behaviour.pause)
            if fault and at == 1 and self._misbehaves(fault):
                return
            words = " ".join(PIECES[: at + 1]).split()
            choice = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
            self._say({"choices": [choice], **({"usage": {"completion_tokens": len(words)}} if counted else {})})
        self._say({"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]})
        if fault != "no_usage":
            self._say({"choices": [], "usage": {"completion_tokens": 0 if fault == "empty" else TOKENS}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer_whole(self, body: dict[str, Any], fault: str) -> None:
        """Says how many messages came before and what the last was; BAD, DOWN and LONG in it have their effect."""
        time.sleep(self.behaviour.pause)
        messages = body.get("messages", [{"content": body.get("prompt")}])
        last = messages[-1]["content"]
        text = f"answer {len(messages)} to {last}"
        choice = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        choice["finish_reason"] = "length" if "LONG" in last else "stop"
        if fault == "no_key":
            self._reply(401, {"error": {"message": "the key is wrong"}})
        elif fault == "busy":
            self._reply(429, {"error": {"message": "too many"}}, {"Retry-After": "0"})
        elif "BAD" in last:
            self._reply(400, {"error": {"message": "the prompt is too long"}})
        elif "DOWN" in last:
            self._reply(500, {"error": {"message": "the engine broke"}})
        elif fault == "garbage":
            self._reply(200, {"choices": []})
        elif fault == "cut":
            self._reply(200, {"choices": [choice]}, {"Content-Length": "100000"})
        else:
            self._reply(200, {"choices": [choice], "usage": {"completion_tokens": len(text.split())}})

    def _misbehaves(self, fault: str) -> bool:
        """What goes wrong in the middle of a stream; whether that is the end of it."""
        if fault == "stall":
            time.sleep(1.0)
        elif fault == "late_error":
            self._say({"error": {"message": "out of pages"}})
        elif fault == "garbage":
            self.wfile.write(b"data: {oops\n\n")
        return fault in ("stall", "late_error", "garbage", "cut", "early")

    def _say(self, event: dict[str, Any]) -> None:
        # Unescaped, as some servers send it: U+2028 ends no line of a stream.
        self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode())


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # the default of 5 loses connections of a load

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keeps quiet about clients that have gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(port: int = 0, **settings: Any) -> Iterator[tuple[str, Behaviour]]:
    """A running server: its URL and how it behaves."""
    state = Behaviour(**settings)
    server = Server(("127.0.0.1", port), type("Canned", (Handler,), {"behaviour": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
