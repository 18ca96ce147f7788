"""The parsers of vLLM and SGLang read the words of every plan for them; neither engine is started, no GPU is needed.

Runs by `make test-engines`, which installs vLLM; SAMETOKEN_ENGINES is the folder of that environment. Of SGLang, which
does not install without CUDA, the sources of the wheel are enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from test_plan import METHODS, OF_ENGINE, STATED, plan

PLACE = os.environ.get("SAMETOKEN_ENGINES", "")
pytestmark = [
    pytest.mark.skipif(not PLACE, reason="needs vLLM: make test-engines"),
    pytest.mark.timeout(900),
]
VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    print(json.dumps(parser.parse_args(words).speculative_config))
"""
SGLANG = """
import argparse, importlib, json, pkgutil, sys, types
import msgspec
package = types.ModuleType("sglang")  # whose own __init__ needs a GPU's libraries
package.__path__ = [sys.argv[1] + "/sglang"]
sys.modules |= {"sglang": package, "orjson": types.ModuleType("orjson")}
from sglang.srt.arg_groups import fields
from sglang.srt.arg_groups.arg_utils import add_cli_args_from_dataclass
parser = argparse.ArgumentParser()
for found in pkgutil.iter_modules(fields.__path__):
    module = importlib.import_module(f"{fields.__name__}.{found.name}")
    for group in vars(module).values():
        if isinstance(group, type) and issubclass(group, msgspec.Struct) and group.__module__ == module.__name__:
            add_cli_args_from_dataclass(parser, group)
for words in json.load(sys.stdin):
    chosen = vars(parser.parse_args(words))
    print(json.dumps({name: chosen[f"speculative_{name}"] for name in ("algorithm", "num_steps", "num_draft_tokens")}))
"""


def parsed(engine: str, methods: tuple[str, ...], code: str, *arguments: str) -> list[dict[str, object]]:
    """What the engine's parser makes of its plans: a JSON object for each method."""
    known = {method: METHODS[method] if engine == "vllm" else {} for method in methods}
    launches = [plan(engine, method, **STATED, **known[method]) for method in methods]
    words = [[*launch.script[2:], *launch.options, *launch.server] for launch in launches]
    done = subprocess.run(
        [Path(PLACE) / "bin" / "python", "-c", code, *arguments],
        input=json.dumps(words), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_vllm() -> None:
    methods = OF_ENGINE["vllm"]
    found = parsed("vllm", methods, VLLM)
    assert [each["num_speculative_tokens"] for each in found] == [5] * len(methods)


def test_sglang(tmp_path: Path) -> None:
    pip = [Path(PLACE) / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path]
    subprocess.run([*pip, "sglang==0.5.23"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.endswith(".py")])
    found = parsed("sglang", (*OF_ENGINE["sglang"], "ngram"), SGLANG, str(tmp_path))
    assert found == [
        {"algorithm": "EAGLE3", "num_steps": 5, "num_draft_tokens": 6},
        {"algorithm": "STANDALONE", "num_steps": 5, "num_draft_tokens": 6},
        {"algorithm": "EAGLE", "num_steps": 5, "num_draft_tokens": 6},
        {"algorithm": "NGRAM", "num_steps": None, "num_draft_tokens": 6},
    ]
