"""From a cell to the process that serves it: which interpreter, which files, or why it is absent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peers_engines.cells import Cell
from peers_engines.host import EngineError, Launch

CONVERTER = Path(__file__).with_name("gguf_convert.py")


class Peers(NamedTuple):
    """Where the engines are and what all of them get.

    Attributes:
        llama_cpp: a llama.cpp source tree with its programs in build/bin, or None.
        convert_python: an interpreter that has what llama.cpp's converter needs.
        vllm_python: an interpreter that has vLLM, or None.
        gguf: where converted models are kept.
        common: threads, draft_len, max_len.
    """

    model: Path
    draft: Path
    llama_cpp: Path | None
    convert_python: str
    vllm_python: str | None
    gguf: Path
    common: Mapping[str, Any]


def launch(cell: Cell, peers: Peers) -> Launch:
    """How to start a cell's engine; converts and quantises models for llama.cpp when they are first needed.

    Raises:
        EngineError: the engine is not installed, or the models cannot be converted.
    """
    spec = {"model": str(peers.model), "draft": str(peers.draft), "dtype": cell.dtype, "mode": cell.mode}
    spec |= peers.common
    match cell.engine:
        case "sametoken":
            return Launch(sys.executable, "ours", spec)
        case "transformers":
            if importlib.util.find_spec("transformers") is None:
                raise EngineError("transformers is not installed in this interpreter")
            return Launch(sys.executable, "hf", spec)
        case "vllm":
            if peers.vllm_python is None:
                raise EngineError("not installed: give --vllm-python, an interpreter that has vLLM for CPU")
            return Launch(peers.vllm_python, "vllm_cpu", spec)
        case "llama.cpp":
            return Launch(sys.executable, "llama_cpp", spec | _llama_cpp_files(cell, peers))
        case _:
            raise EngineError(f"engine {cell.engine!r}: expected sametoken, transformers, vllm or llama.cpp")


def _llama_cpp_files(cell: Cell, peers: Peers) -> dict[str, str]:
    if peers.llama_cpp is None:
        raise EngineError("not installed: give --llama-cpp, a source tree with llama-server in build/bin")
    server = peers.llama_cpp / "build" / "bin" / "llama-server"
    if not server.is_file():
        raise EngineError(f"{server} does not exist; build the targets llama-server and llama-quantize")
    # The draft is nearly lossless and fastest in 8 bits beside any quantised target.
    draft_type = "bf16" if cell.dtype == "bf16" else "q8_0"
    return {
        "server": str(server),
        "model": str(_gguf(peers.model, cell.dtype, peers)),
        "draft": str(_gguf(peers.draft, draft_type, peers)),
    }


def _gguf(model: Path, dtype: str, peers: Peers) -> Path:
    """A model's file in this type, made anew if the model is newer."""
    assert peers.llama_cpp is not None
    path = peers.gguf / f"{model.name}-{dtype}.gguf"
    newest = max(file.stat().st_mtime for file in model.glob("*.safetensors"))
    if path.exists() and path.stat().st_mtime > newest:
        return path
    peers.gguf.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    if dtype == "bf16":
        _run([peers.convert_python, str(CONVERTER), str(peers.llama_cpp), str(model), str(part)])
    else:
        quantize = str(peers.llama_cpp / "build" / "bin" / "llama-quantize")
        _run([quantize, str(_gguf(model, "bf16", peers)), str(part), dtype.upper()])
    return part.rename(path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EngineError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise EngineError(f"{' '.join(command[:2])} failed: {last}")
