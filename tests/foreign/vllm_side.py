"""What stands beside vLLM's tests: a plugin of pytest, and the module `tests.utils` that they import.

Its servers are `sametoken vllm serve` with the command line that a test gives, in a directory where the names of models
are paths; one that the next test asks for again goes on. vLLM itself is not installed: its modules are stand-ins, which
have the few functions that a test of a server calls. Tests that never reach a server are left out.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

FOLDER, NAMED = Path(os.environ["PEER_FOLDER"]), Path(os.environ["PEER_NAMED"])
START_SECONDS, STOP_SECONDS = 180.0, 30.0
CACHE = ("--kv-cache-max-tokens", "20480")  # so that a server takes little of the memory
# A small model goes on and on where a test sets no limit, and draws another outcome in each run where it sets no seed.
TOKENS = ("--override-generation-config", '{"max_new_tokens": 512, "temperature": 0}')
# Options of what is not here and refused, which other tests of a file do not need.
NOT_HERE = ("--enable-lora", "--lora-modules", "--max-lora-rank", "--max-cpu-loras", "--tool-server")
VLLM_PATH = FOLDER


def get_open_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get_tokenizer(tokenizer_name: str, *given: Any, **options: Any) -> Any:
    """The tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(NAMED / tokenizer_name)


class ModelConfig:
    """The size of a model's vocabulary, by its name."""

    def __init__(self, model: str, **options: Any) -> None:
        self._read = json.loads((NAMED / model / "config.json").read_text())

    def get_vocab_size(self) -> int:
        """As its configuration says it."""
        return int(self._read["vocab_size"])


class _Nothing:
    """Has every method, each of which returns nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **options: 0


class _Off:
    """Settings that are all off."""

    def __getattr__(self, name: str) -> None:
        return None


STAND_INS: dict[str, Any] = {
    "get_open_port": get_open_port, "get_tokenizer": get_tokenizer, "ModelConfig": ModelConfig, "envs": _Off(),
    "current_platform": _Nothing(), "hf_api": _Nothing, "__version__": "0.33.0", "HAS_TRITON": False,
    "VLLM_USE_RUST_FRONTEND": False,
    "version": SimpleNamespace(_prev_minor_version=lambda: "0.32"), "_prev_minor_version": lambda: "0.32",
}  # fmt: skip


class _Anything:
    """Takes any arguments."""

    def __init__(self, *given: Any, **options: Any) -> None:
        pass


class _StandIn(ModuleType):
    """A module of vLLM's: a name that has no stand-in is an empty class, or an error of that name."""

    __path__: list[str] = []  # noqa: RUF012 - of a package, so that modules below it are found

    def __getattr__(self, name: str) -> Any:
        if name in STAND_INS:
            return STAND_INS[name]
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (Exception if name.endswith("Error") else _Anything,), {})
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are made when they are asked for."""


sys.meta_path.insert(0, _Finder())


class _Running:
    """The one server that runs, and the command that started it."""

    command: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def stop(cls) -> None:
        """Ends it."""
        process, cls.process, cls.command = cls.process, None, ()
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


atexit.register(_Running.stop)
os.chdir(NAMED)  # a name is a path of the model for a tokenizer of transformers too


class RemoteOpenAIServer:
    """A server of one model, as their tests start it.

    Args:
        model: its name. `vllm_serve_args`: the command line. `seed`: an option that every server gets.
        env_dict: variables of its environment. `override_hf_configs`: of the model's configuration.
    """

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        override_hf_configs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        arguments = _without(NOT_HERE, [str(each) for each in vllm_serve_args])
        if TOKENS[0] not in arguments:
            arguments += TOKENS
        if "--seed" not in arguments:
            arguments += ["--seed", str(seed)]
        if override_hf_configs is not None:
            arguments += ["--hf-overrides", json.dumps(override_hf_configs)]
        self.host, self.uds = _value(arguments, "--host") or "127.0.0.1", _value(arguments, "--uds")
        self.show_hidden_metrics = any(each.startswith("--show-hidden-metrics") for each in arguments)
        self._scheme = "https" if "--ssl-certfile" in arguments else "http"
        command = (os.environ["SAMETOKEN"], "vllm", "serve", model, *arguments, *CACHE)
        if command != _Running.command or _Running.process is None or _Running.process.poll() is not None:
            _Running.stop()
            RemoteOpenAIServer.port = int(_value(arguments, "--port") or get_open_port())
            self._start(command, env_dict or {})
        assert _Running.process is not None
        self.proc = _Running.process

    port = 0

    def _start(self, command: tuple[str, ...], variables: dict[str, str]) -> None:
        where = () if "--port" in command or self.uds else ("--port", str(self.port))
        with (FOLDER / "servers.txt").open("ab") as log:
            log.write(f"\n{' '.join((*command, *where))}\n".encode())
            log.flush()
            _Running.process = subprocess.Popen(
                [*command, *where], cwd=NAMED, env={**os.environ, **variables}, stdout=log, stderr=log
            )
        _Running.command = command
        end = time.monotonic() + START_SECONDS
        transport = httpx.HTTPTransport(uds=self.uds, verify=False)
        with httpx.Client(transport=transport) as client:
            while time.monotonic() < end:
                if _Running.process.poll() is not None:
                    raise RuntimeError(f"the server ended with {_Running.process.returncode}: see servers.txt")
                try:
                    if client.get(self.url_for("health")).status_code == 200:
                        return
                except httpx.HTTPError:
                    time.sleep(0.1)
        raise RuntimeError(f"no server after {START_SECONDS:g} s")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        """The server stays for the next test with its command line."""

    def _get_process_termination_timeout(self) -> float:
        return 15.0

    @property
    def url_root(self) -> str:
        return f"{self._scheme}://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def _client(self, kind: Any, address: str, options: dict[str, Any]) -> Any:
        return kind(**{"base_url": address, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 300, **options})

    def get_client(self, **options: Any) -> Any:
        import openai

        return self._client(openai.OpenAI, self.url_for("v1"), options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return self._client(openai.AsyncOpenAI, self.url_for("v1"), options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return self._client(anthropic.Anthropic, self.url_root, options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return self._client(anthropic.AsyncAnthropic, self.url_root, options)


def _value(arguments: Sequence[str], option: str) -> str | None:
    return arguments[arguments.index(option) + 1] if option in arguments else None


def _without(options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The words of a command line that belong to no such option."""
    kept, belongs = [], False
    for word in arguments:
        belongs = word in options if word.startswith("--") else belongs
        kept += [] if belongs else [word]
    return kept


def _needs_hardware(*given: Any, **options: Any) -> Any:
    return given[0] if given and callable(given[0]) else lambda test: pytest.mark.skip(reason="needs GPUs")(test)


utils = _StandIn("tests.utils")  # whatever else a test takes from there is not called where it reaches a server
utils.__dict__.update(
    RemoteOpenAIServer=RemoteOpenAIServer, RemoteVLLMServer=RemoteOpenAIServer, VLLM_PATH=VLLM_PATH,
    ROCM_EXTRA_ARGS=[], ROCM_ENGINE_KWARGS={}, multi_gpu_only=_needs_hardware, large_gpu_mark=_needs_hardware,
    requires_fp8=lambda test: test,
)  # fmt: skip
sys.modules["tests.utils"] = utils
INSIDE = "tests.entrypoints.openai.chat_completion.test_serving_chat"  # which another file of tests takes stubs from
sys.modules[INSIDE] = _StandIn(INSIDE)
conftest = ModuleType("tests.conftest")
conftest.__dict__.update(__file__=str(FOLDER / "tests" / "conftest.py"), LocalAssetServer=object)
sys.modules["tests.conftest"] = conftest


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    items[:] = [item for item in items if _reaches(item)]


def _reaches(item: pytest.Function) -> bool:
    """Whether a test talks to a server: it takes one or its client, or starts one."""
    names = inspect.signature(item.function).parameters
    taken = any("server" in name or ("client" in name and name != "mock_client") for name in names)
    return taken or "RemoteOpenAIServer(" in inspect.getsource(item.function)


@pytest.fixture(scope="session")
def zephyr_lora_files() -> str:
    """No adapter: tests of adapters have an excuse, and others are not asked for one."""
    return "adapter"


smollm2_lora_files = local_asset_server = zephyr_lora_files


@pytest.fixture(scope="session")
def num_gpus_available() -> int:
    return 0


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    patch = pytest.MonkeyPatch()
    yield patch
    patch.undo()


@pytest.fixture
def default_vllm_config() -> None:
    pytest.skip("about the inside of vLLM")
