"""The Dynamo worker without Dynamo: requests, chunks, migration, KV events, and what is checked before the start.

`make test-dynamo` runs the rest, with ai-dynamo.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

import pytest

from sametoken import LLM, SamplingParams, embedded
from sametoken.deploy.dynamo import preflight
from sametoken.deploy.dynamo.engine import DynamoEngine, PageEvents, Served, as_dynamo, hash_of
from sametoken.deploy.dynamo.preflight import Address, Planes, planes_of
from sametoken.deploy.dynamo.translation import sampling_of, seed_of
from sametoken.engine.async_llm import AsyncLLM
from sametoken.errors import ConfigError, EngineError, ModelOutputError, RequestError, SametokenError
from sametoken.options.sampling import StructuredOutputs
from sametoken.options.server import ServerConfig
from sametoken.server.errors import stopping
from sametoken.server.metrics import Metrics
from sametoken.server.worker import Worker

PROMPT = [1, 260, 1098, 468, 359, 1029, 955, 531, 359, 825, 274, 2, 261]


def asked(tokens: list[int] = PROMPT, **options: Any) -> dict[str, Any]:
    """A request as the frontend of ai-dynamo 1.6.1 sends it, every key there."""
    request: dict[str, Any] = {
        "model": "embedded",
        "token_ids": tokens,
        "stop_conditions": dict.fromkeys(
            ("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden", "min_tokens",
             "ignore_eos", "max_thinking_tokens")
        ),
        "sampling_options": dict.fromkeys(
            ("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
             "top_k", "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output",
             "guided_decoding")
        ),
        "output_options": dict.fromkeys(
            ("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids")
        ),
        "eos_token_ids": [2], "mdc_sum": "39b6", "annotations": [], "routing": {}, "router_config_override": None,
    }  # fmt: skip
    for group in ("stop_conditions", "sampling_options", "output_options"):
        request[group].update({name: options.pop(name) for name in list(options) if name in request[group]})
    return request | options


def read(request: dict[str, Any], recommended: dict[str, Any] | None = None) -> SamplingParams:
    return sampling_of(request, recommended or {}, [2], "a key")


def test_a_request_becomes_our_parameters() -> None:
    given = asked(
        temperature=0.699999988079071, top_p=0.949999988079071, top_k=40, min_p=0.05000000074505806, seed=7,
        presence_penalty=0.5, frequency_penalty=-0.30000001192092896, repetition_penalty=1.100000023841858,
        max_tokens=9, min_tokens=2, stop=["the"], stop_token_ids=[5], stop_token_ids_hidden=[2], logprobs=3,
    )  # fmt: skip
    assert read(given) == SamplingParams(
        temperature=0.7, top_p=0.95, top_k=40, min_p=0.05, seed=7, presence_penalty=0.5, frequency_penalty=-0.3,
        repetition_penalty=1.1, max_tokens=9, min_tokens=2, stop_token_ids=(2, 5), logprobs=3,
    )  # fmt: skip


def test_what_is_not_given_comes_from_the_model_and_the_context() -> None:
    params = read(asked(temperature=0.5), {"temperature": 0.9, "top_p": 0.8})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.8, None)
    assert params.seed == seed_of("a key") != seed_of("another key")
    assert 0 <= seed_of("a key") < 2**63


def test_a_request_that_ignores_the_end_does_not_stop_at_it() -> None:
    params = read(asked(ignore_eos=True, stop_token_ids_hidden=[2, 9]))
    assert params.ignore_eos
    assert params.stop_token_ids == (9,)


def test_the_form_of_an_output_is_kept() -> None:
    guided = {"regex": "[0-9]{4}", "json": None, "backend": "xgrammar"}
    assert read(asked(guided_decoding=guided)).structured_outputs == StructuredOutputs(regex="[0-9]{4}")
    with pytest.raises(RequestError, match="got whitespace_pattern, expected one of json, regex, choice, grammar"):
        read(asked(guided_decoding={"regex": "a", "whitespace_pattern": " "}))


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("n", 2, 1),
        ("best_of", 3, 1),
        ("use_beam_search", True, False),
        ("length_penalty", 0.5, 1.0),
        ("max_thinking_tokens", 9, None),
        ("prompt_logprobs", 0, None),
        ("multi_modal_data", {"image": []}, {}),
    ],
)
def test_what_cannot_be_done_is_refused(name: str, value: Any, harmless: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}: .*leave it out"):
        read(asked(**{name: value}))
    read(asked(**{name: harmless}))


class Context:
    """The part of Dynamo's context that a worker sees."""

    def __init__(self, key: str = "a key") -> None:
        self.key, self.stopped = key, asyncio.Event()

    def id(self) -> str:
        return self.key

    async def async_killed_or_stopped(self) -> None:
        await self.stopped.wait()


class Recorder:
    """A publisher of KV events that records what the router would know."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int, ...]] = {}

    def publish_stored(
        self, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> None:
        (name,), (size,) = block_hashes, num_block_tokens
        assert size == len(token_ids)
        assert -(2**63) <= name < 2**63
        self.pages[name] = (() if parent_hash is None else self.pages[parent_hash]) + tuple(token_ids)

    def publish_removed(self, block_hashes: list[int]) -> None:
        for name in block_hashes:
            del self.pages[name]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", embedded.HEAD_NAME, {"adaptive": False}, kv_cache={"tokens_per_block": 16})


@pytest.fixture(autouse=True)
def exceptions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for dynamo.llm.exceptions."""
    module = ModuleType("dynamo.llm.exceptions")
    for name in ("InvalidArgument", "EngineShutdown", "HttpError"):
        setattr(module, name, type(name, (Exception,), {}))
    parent = ModuleType("dynamo.llm")
    parent.exceptions = module  # type: ignore[attr-defined]
    for name, each in (("dynamo", ModuleType("dynamo")), ("dynamo.llm", parent), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, each)
    return module


def made(llm: LLM, **config: Any) -> DynamoEngine:
    """An engine as after `start`."""
    engine = DynamoEngine(lambda: llm, Served("", "embedded", ()), ServerConfig(**config))
    engine._worker = Worker(AsyncLLM(llm), ServerConfig(**config), Metrics("embedded"))
    return engine


def serve(llm: LLM, *requests: dict[str, Any], after: int | None = None, **config: Any) -> list[list[dict[str, Any]]]:
    """The chunks of requests that are served together; each is stopped after so many chunks, if it says so."""

    async def one(engine: DynamoEngine, request: dict[str, Any]) -> list[dict[str, Any]]:
        context, chunks = Context(), []
        async for chunk in engine.generate(request, context):
            chunks.append(chunk)
            if len(chunks) == after:
                context.stopped.set()
        return chunks

    async def run() -> list[list[dict[str, Any]]]:
        engine = made(llm, **config)
        try:
            return await asyncio.gather(*(one(engine, request) for request in requests))
        finally:
            await engine.cleanup()
            await engine.cleanup()  # harmless

    return asyncio.run(run())


def tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.800000011920929, "seed": 7}
PENALISED = SEEDED | {"repetition_penalty": 1.2000000476837158}


@pytest.mark.parametrize("options", [GREEDY, SEEDED, PENALISED, {"temperature": 1.0}])
def test_a_migrated_request_goes_on_with_the_same_tokens(llm: LLM, options: dict[str, Any]) -> None:
    (whole,) = serve(llm, asked(max_tokens=40, ignore_eos=True, **options))
    made = tokens(whole)
    assert len(made) == 40
    assert max(len(chunk["token_ids"]) for chunk in whole) > 1, "no chunk has several tokens"
    assert [chunk.get("finish_reason") for chunk in whole] == [None] * (len(whole) - 1) + ["length"]
    for cut in (1, 17):
        (rest,) = serve(llm, asked(PROMPT + made[:cut], max_tokens=40 - cut, ignore_eos=True, **options))
        assert made[:cut] + tokens(rest) == made


def test_the_tokens_are_those_of_an_engine_without_dynamo(llm: LLM) -> None:
    (chunks,) = serve(llm, asked(max_tokens=40, **SEEDED, logprobs=2))
    (own,) = llm.generate([PROMPT], SamplingParams(temperature=0.8, seed=7, max_tokens=40, logprobs=2))
    assert tokens(chunks) == own.token_ids
    assert own.logprobs is not None
    said = [value for chunk in chunks for value in chunk["log_probs"]]
    assert said == pytest.approx([each.logprob for each in own.logprobs], abs=1e-4)
    for token, best in zip(tokens(chunks), (top for chunk in chunks for top in chunk["top_logprobs"]), strict=True):
        assert token in [each["token_id"] for each in best]
        assert 2 <= len(best) <= 3
    assert chunks[-1]["finish_reason"] == ("eos" if own.finish_reason == "stop" else "length")


def test_a_cancelled_request_gives_its_pages_back(llm: LLM) -> None:
    (chunks,) = serve(llm, asked(max_tokens=900, ignore_eos=True, **GREEDY), after=3)
    assert chunks[-1] == {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
    assert len(tokens(chunks)) < 100
    assert llm.engine.load.pages_used == llm.engine.load.running == 0


def test_a_stream_that_is_stopped_and_never_resumed_ends_too(llm: LLM) -> None:
    async def run() -> None:
        engine = made(llm)
        context = Context()
        stream = engine.generate(asked(max_tokens=900, ignore_eos=True, **GREEDY), context)
        await anext(stream)
        assert engine.worker.open_requests == 1
        context.stopped.set()
        async with asyncio.timeout(30):
            while engine.worker.open_requests or llm.engine.load.running:
                await asyncio.sleep(0.01)
        assert llm.engine.load.pages_used == 0
        await engine.cleanup()

    asyncio.run(run())


def test_events_hold_committed_tokens_alone(llm: LLM) -> None:
    record, blocks = Recorder(), llm.engine.scheduler.blocks
    blocks.listener = PageEvents(record)
    prompts = [[1, 260, 890 + i, 2, 261] for i in range(3)]
    served = serve(llm, *(asked(prompt, max_tokens=60, ignore_eos=True, **GREEDY) for prompt in prompts))
    texts = [tuple(prompt + tokens(chunks)) for prompt, chunks in zip(prompts, served, strict=True)]
    assert blocks.listener is None, "an engine that was cleaned up publishes nothing"
    assert len(record.pages) >= 3 * (len(texts[0]) - 1) // 16
    for page in record.pages.values():
        assert len(page) % 16 == 0
        assert any(text[: len(page)] == page for text in texts)
    assert {hash_of(digest) for digest in blocks._page_of} >= record.pages.keys()


def test_errors_say_whose_fault_it_is(llm: LLM, exceptions: Any) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="n: got 2"):
        serve(llm, asked(n=2))
    with pytest.raises(exceptions.InvalidArgument, match="prompt: 99999 is out of vocabulary"):
        serve(llm, asked([1, 99999]))
    with pytest.raises(exceptions.HttpError, match=r"429, .*try again later"):
        serve(llm, *(asked(max_tokens=4) for _ in range(17)), max_queue=0)
    assert isinstance(as_dynamo(EngineError("x")), exceptions.EngineShutdown)
    assert isinstance(as_dynamo(SametokenError("the engine has stopped")), exceptions.EngineShutdown)
    assert as_dynamo(TimeoutError("5 s are over")).args[0] == 408
    assert as_dynamo(ModelOutputError("not finite")).args[0] == 500
    assert isinstance(as_dynamo(stopping()), exceptions.EngineShutdown)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that seem to be installed."""
    versions = {"ai-dynamo": "1.6.1", "ai-dynamo-runtime": "1.6.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(preflight.importlib.metadata, "version", version)
    return versions


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    for port in range(20_000, 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            yield port
            return


@pytest.fixture
def closed() -> int:
    """A port where nobody listens."""
    for port in range(31_000, 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("every port is in use")


FILE = Planes("file", "tcp", "zmq")


def test_the_package_must_be_there_and_new_enough(installed: dict[str, str]) -> None:
    preflight.check(FILE, {})
    installed["ai-dynamo"] = "1.5.1"
    with pytest.raises(ConfigError, match=r"ai-dynamo is 1\.5\.1, a worker needs 1\.6 or newer: pip install"):
        preflight.check(FILE, {})
    del installed["ai-dynamo-runtime"]
    with pytest.raises(ConfigError, match="needs ai-dynamo-runtime, which is not installed: pip install"):
        preflight.check(FILE, {})


def test_services_must_answer(installed: dict[str, str], taken: int, closed: int) -> None:
    etcd, nats = Planes("etcd", "tcp", "zmq"), Planes("file", "tcp", "nats")
    preflight.check(etcd, {"ETCD_ENDPOINTS": f"http://127.0.0.1:{closed},http://127.0.0.1:{taken}"})
    with pytest.raises(ConfigError, match=f"etcd does not answer at http://127.0.0.1:{closed}: Connection refused; .*"):
        preflight.check(etcd, {"ETCD_ENDPOINTS": f"http://127.0.0.1:{closed}"})
    preflight.check(nats, {"NATS_SERVER": f"nats://127.0.0.1:{taken}"})
    with pytest.raises(ConfigError, match=f"NATS does not answer at 127.0.0.1:{closed}: Connection refused; start it"):
        preflight.check(nats, {"NATS_SERVER": f"127.0.0.1:{closed}"})


def test_the_system_port_must_be_free(installed: dict[str, str], taken: int, closed: int) -> None:
    here = {"DYN_SYSTEM_HOST": "127.0.0.1"}
    preflight.check(FILE, here | {"DYN_SYSTEM_PORT": str(closed)})
    with pytest.raises(ConfigError, match=f"DYN_SYSTEM_PORT={taken} on 127.0.0.1 cannot be used: Address already in"):
        preflight.check(FILE, here | {"DYN_SYSTEM_PORT": str(taken)})
    with pytest.raises(ConfigError, match="DYN_SYSTEM_PORT is '8o81', expected 0 to 32767"):
        preflight.check(FILE, {"DYN_SYSTEM_PORT": "8o81"})
    with pytest.raises(ConfigError, match="DYN_SYSTEM_PORT is '40000', expected 0 to 32767"):
        preflight.check(FILE, {"DYN_SYSTEM_PORT": "40000"})


def test_names_come_from_options_then_from_the_environment() -> None:
    assert planes_of({}, None, None, None) == Planes("etcd", "tcp", "zmq")
    environ = {"DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "nats", "DYN_NAMESPACE": "two"}
    assert planes_of(environ, None, None, "zmq") == Planes("file", "tcp", "zmq")
    assert Address.of(environ, None, None) == ("two", "backend", "generate")
    assert Address.of(environ, None, "dyn://a.b.c") == ("a", "b", "c")
    with pytest.raises(ConfigError, match="--request-plane is 'http', expected one of tcp, nats"):
        planes_of({}, None, "http", None)
    with pytest.raises(ConfigError, match="expected dyn://NAMESPACE"):
        Address.of({}, None, "backend")
    with pytest.raises(ConfigError, match="leave one of them out"):
        Address.of({}, "x", "dyn://a.b.c")


def test_a_command_without_dynamo_ends_with_one_sentence(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    answer = run("deploy", "dynamo", "--model", "embedded")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: a Dynamo worker needs ai-dynamo, which is not installed: pip install")
    assert answer.err.count("\n") == 1
    answer = run("deploy", "dynamo", "embedded", "--model", "embedded")
    assert answer.err.startswith("error: got the model twice")
