"""From a cell to the process that serves it: which interpreter, which files, or why it is absent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peers_engines import awq_write
from peers_engines.cells import DIRECTORIES, GGUF, Cell
from peers_engines.host import EngineError, Launch

# What `sametoken quantize` calls the formats of directories; AWQ is not among them.
WRITTEN = {"fp8": "fp8", "w8a8": "int8", "w4a16": "int4", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}
CONVERTER = Path(__file__).with_name("gguf_convert.py")


class Peers(NamedTuple):
    """Where the engines are and what all of them get.

    Attributes:
        llama_cpp: a llama.cpp source tree with its programs in build/bin, or None.
        convert_python: an interpreter that has what llama.cpp's converter needs.
        vllm_python: an interpreter that has vLLM, or None.
        made: where converted and quantised models are kept.
        common: threads, draft_len, max_len.
    """

    model: Path
    draft: Path
    llama_cpp: Path | None
    convert_python: str
    vllm_python: str | None
    made: Path
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
            on_load = {"quantization": cell.dtype} if cell.dtype in ("int8", "int4") else {}
            return Launch(sys.executable, "ours", spec | _file(cell, peers) | on_load)
        case "transformers":
            if importlib.util.find_spec("transformers") is None:
                raise EngineError("transformers is not installed in this interpreter")
            return Launch(sys.executable, "hf", spec)
        case "vllm":
            if peers.vllm_python is None:
                raise EngineError("not installed: give --vllm-python, an interpreter that has vLLM for CPU")
            return Launch(peers.vllm_python, "vllm_cpu", spec | _file(cell, peers))
        case "llama.cpp":
            return Launch(sys.executable, "llama_cpp", spec | _llama_cpp_files(cell, peers))
        case _:
            raise EngineError(f"engine {cell.engine!r}: expected sametoken, transformers, vllm or llama.cpp")


def _file(cell: Cell, peers: Peers) -> dict[str, str]:
    """The file or directory of the cell's format, beside the draft as it is."""
    if cell.dtype in GGUF:
        return {"model": str(_gguf(peers.model, cell.dtype, peers))}
    return {"model": str(_directory(cell.dtype, peers))} if cell.dtype in DIRECTORIES else {}


def _directory(dtype: str, peers: Peers) -> Path:
    """The model quantised to this format, rounded to nearest, made when it is not there."""
    path = peers.made / f"{peers.model.name}-{dtype}"
    if path.exists():
        return path
    peers.made.mkdir(parents=True, exist_ok=True)
    if dtype == "awq":
        awq_write.write(peers.model, path)
    else:
        command = [sys.executable, "-m", "sametoken.cli", "quantize", str(peers.model), "--format", WRITTEN[dtype]]
        _run([*command, "--output", str(path), "--calibration-tokens", "512", "--held-out-tokens", "256"])
    return path


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
    if peers.llama_cpp is None:
        raise EngineError("no GGUF file: give --llama-cpp, a source tree with llama-quantize in build/bin")
    path = peers.made / f"{model.name}-{dtype}.gguf"
    newest = max(file.stat().st_mtime for file in model.glob("*.safetensors"))
    if path.exists() and path.stat().st_mtime > newest:
        return path
    peers.made.mkdir(parents=True, exist_ok=True)
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
