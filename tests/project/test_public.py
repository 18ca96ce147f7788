"""The public names of the package: complete, importable, and free of torch until one needs it."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sametoken
from sametoken import errors

PROMISED = {
    "LLM", "AsyncLLM", "SamplingParams", "RequestSpeculation", "SpeculativeConfig", "KVCacheConfig", "Completion",
    "Chunk",
}  # fmt: skip


def test_every_public_name_is_its_own_object() -> None:
    found = {name: getattr(sametoken, name) for name in sametoken.__all__}
    assert all(value.__name__ == name for name, value in found.items() if name != "__version__")
    assert set(dir(sametoken)) >= set(sametoken.__all__)


def test_public_names_are_the_promised_ones_and_every_error() -> None:
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert set(sametoken.__all__) == PROMISED | tree | {"__version__"}
    assert len(sametoken.__all__) == len(set(sametoken.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lllm'"):
        sametoken.Lllm  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import sametoken; sametoken.__version__",
        "from sametoken import SamplingParams, SametokenError, RequestSpeculation",
        "from sametoken import SpeculativeConfig, KVCacheConfig",
        "from sametoken import embedded",
    ],
)
def test_names_without_tensors_import_no_torch(statement: str) -> None:
    check = "import sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", f"{statement}; {check}"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_constraints_pin_everything_exactly_and_name_no_index() -> None:
    root = Path(__file__).parents[2]
    pins = [line for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line and not line.startswith("-") for line in pins)
    names = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    assert {item.split(">")[0].split("=")[0].lower().replace("_", "-") for item in wanted} <= names
