"""Hidden states from servers: those that the same target gives in this process, and errors that say what is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_prepared import write
from torch import Tensor

from cli_checks import Pair
from sametoken.checkpoint.load import load_decoder
from sametoken.errors import ConfigError, DataError
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import chain_mask
from sametoken.train.dataset.extraction import FeatureReader
from sametoken.train.dataset.prepared import Prepared
from sametoken.train.dataset.served_states import ServedStates, WantedStates
from sametoken.train.targets import read_norm
from speakers import turns

TAPS = (0, 1)
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def states_of(decoder: Decoder, tokens: Tensor, layer_ids: list[int]) -> Tensor:
    """[S, layers, H] as vLLM has them: number i is what block i reads."""
    table = PageTable(1, 9, 8, 32, tokens.device)
    table.extend(0, range(1, 9))
    cache = KVCache.of(decoder.config, table, decoder.dtype, tokens.device)
    place, size = torch.zeros(1, dtype=torch.int64), len(tokens)
    span = Span(place, (0,), place, chain_mask(1, size, tokens.device), size, size)
    taps = tuple(each - 1 for each in layer_ids[:-1])
    with torch.no_grad():
        found = decoder.run(tokens, cache, [span], taps)
    return torch.stack([*found.taps, found.last], dim=1)


@contextmanager
def vllm(decoder: Decoder, place: Path, layer_ids: list[int], change: Change = lambda found: found) -> Iterator[str]:
    """A server that answers as vLLM does with its connector for hidden states."""
    numbers, asked = count(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert (body["model"], body["max_tokens"]) == ("served", 1)
            tokens = torch.tensor(body["prompt"])
            with asked:
                found = {"hidden_states": states_of(decoder, tokens, layer_ids), "token_ids": tokens}
                file = place / f"{server.server_port}-{next(numbers)}.safetensors"
            file.with_name(f"{file.name}.lock").touch()
            if found := change(found):
                save_file(found, file)
            choice = {"text": "a", "finish_reason": "length"}
            self.reply({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(file)}})

        def reply(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def decoder(tiny_pair: Pair) -> Decoder:
    return load_decoder(Path(tiny_pair.target), torch.float32, torch.device("cpu"))


def wanted(decoder: Decoder, tiny_pair: Pair, taps: tuple[int, ...] = TAPS) -> WantedStates:
    norm = read_norm(Path(tiny_pair.target), torch.float32)
    return WantedStates(taps, decoder.config.num_layers, decoder.config.hidden_size, torch.float32, norm)


@pytest.mark.parametrize("last", [False, True])
def test_two_servers_give_what_this_process_gives(
    decoder: Decoder, tiny_pair: Pair, tmp_path: Path, last: bool
) -> None:
    taps = (0, decoder.config.num_layers - 1) if last else TAPS
    samples = [torch.arange(5, 12 + length) % 90 for length in range(9)]
    asked = wanted(decoder, tiny_pair, taps)
    assert len(asked.layer_ids) == (2 if last else 3)
    with vllm(decoder, tmp_path, asked.layer_ids) as one, vllm(decoder, tmp_path, asked.layer_ids) as two:
        found = ServedStates([one, two], None, asked, 2)(samples)
    reader = FeatureReader(decoder, taps, 64)
    for states, tokens in zip(found, samples, strict=True):
        assert torch.equal(states, reader(tokens))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda found: {}, "it is not here; expected a directory"),
        (lambda found: {"token_ids": found["token_ids"]}, "it holds token_ids; expected hidden_states"),
        (lambda found: found | {"token_ids": found["token_ids"][:-1]}, "its 4 tokens are not the 5 of the prompt"),
        (lambda found: found | {"hidden_states": found["hidden_states"][:, 1:].clone()}, "layer_ids [1, 2, 3]"),
        (lambda found: found | {"hidden_states": found["hidden_states"].bfloat16()}, "it is in bfloat16"),
    ],
)  # fmt: skip
def test_what_is_not_wanted_is_refused(
    decoder: Decoder, tiny_pair: Pair, tmp_path: Path, change: Change, problem: str
) -> None:
    asked = wanted(decoder, tiny_pair)
    with vllm(decoder, tmp_path, asked.layer_ids, change) as url, pytest.raises(DataError) as refused:
        ServedStates([url], None, asked, 2)([torch.arange(5)])
    assert problem in str(refused.value)
    assert url in str(refused.value)


def test_a_server_that_is_not_there_is_named(
    decoder: Decoder, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sametoken.train.dataset.served_states.RETRIES", 0)
    with pytest.raises(ConfigError, match="expected a running OpenAI-compatible server"):
        ServedStates(["http://127.0.0.1:9"], None, wanted(decoder, tiny_pair), 1)([torch.arange(3)])


def test_prepare_asks_servers_and_goes_on(run: Any, decoder: Decoder, tiny_pair: Pair, tmp_path: Path) -> None:
    data = write(tmp_path / "data", [{"messages": turns(f"Question {i}", "fox " * (i + 1))} for i in range(5)])
    words = ("prepare", tiny_pair.target, "--data", str(data), "--hidden-states", "--taps", "0,1", "--dtype", "float32")
    assert run(*words, "--output", str(tmp_path / "here")).code == 0
    (tmp_path / "files").mkdir()
    with vllm(decoder, tmp_path / "files", wanted(decoder, tiny_pair).layer_ids) as url:
        served = (*words, "--output", str(tmp_path / "served"), "--url", url, "--concurrency", "3")
        assert run(*served).code == 0
    assert "0 of 1 shards written now" in run(*served).out
    here, there = (Prepared.open(tmp_path / name) for name in ("here", "served"))
    for sample in range(5):
        expected, found = here.features(sample), there.features(sample)
        assert expected is not None
        assert found is not None
        assert all(map(torch.equal, expected, found))
    answer = run(*words, "--output", str(tmp_path / "no"), "--concurrency", "3")
    assert (answer.code, "--concurrency is for servers: give --url too" in answer.err) == (2, True)
