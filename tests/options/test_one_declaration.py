"""A sampling parameter has one declaration: one that is added to a copy of it appears at every edge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sametoken"
ADDED = '''
    warmth: Annotated[float, Field(ge=0, le=3)] = 0.5
    """how warm the text is."""
'''
BEFORE = "\n    structured_outputs: Annotated"
PROGRAM = """
import asyncio, contextlib, inspect, io, json, sys
sys.path[:0] = sys.argv[1:]

import reference
from sametoken import RequestError, SamplingParams, cli
from sametoken.commands.options import sampling_of, sampling_options
from sametoken.server.chat_schema import ChatRequest
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.schema import CompletionRequest

def refusal(call, **values):
    try:
        call(**values)
    except ValueError as error:
        return str(error)

said = {"messages": [{"role": "user", "content": "hi"}], "warmth": 2}
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    cli.main(["generate", "--help"])
given = {option.name: option.default for option in sampling_options()} | {"warmth": 1.5}
print(json.dumps({
    "signature": inspect.signature(SamplingParams).parameters["warmth"].default,
    "python": [SamplingParams().warmth, SamplingParams(warmth=2).warmth, refusal(SamplingParams, warmth=4)],
    "json": SamplingParams.from_mapping({"warmth": 1}).warmth,
    "help": " ".join(shown.getvalue().split()),
    "option": sampling_of(given).warmth,
    "chat": ChatRequest(**said).request.values["warmth"],
    "completions": CompletionRequest(prompt="hi", warmth=2).request.values["warmth"],
    "responses": ResponsesRequest(input="hi", warmth=2).request.values["warmth"],
    "body": refusal(ChatRequest, **{**said, "warmth": 4}),
    "document": asyncio.run(reference.document())["components"]["schemas"]["ChatRequest"]["properties"]["warmth"],
    "table": reference.written("<!-- generated: fields --><!-- end -->"),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the edges of the package say about a parameter that one declaration has got."""
    copy = tmp_path_factory.mktemp("package") / "sametoken"
    (copy / "options").mkdir(parents=True)
    for file in [*PACKAGE.iterdir(), *(PACKAGE / "options").iterdir()]:
        place = copy / file.relative_to(PACKAGE)
        if file.name not in ("options", "sampling.py", "__pycache__"):
            place.symlink_to(file)
    text = (PACKAGE / "options" / "sampling.py").read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    (copy / "options" / "sampling.py").write_text(text.replace(BEFORE, ADDED.rstrip() + BEFORE), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(copy.parent), str(ROOT / "scripts")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_python_has_it_with_its_default_and_limits(found: dict[str, Any]) -> None:
    refusal = "warmth: got 4, expected a number in [0, 3]; change it or leave it out for the default"
    assert found["signature"] == 0.5
    assert found["python"] == [0.5, 2, refusal]
    assert found["json"] == 1


def test_the_command_line_has_it(found: dict[str, Any]) -> None:
    assert re.search(r"--warmth \S+ How warm the text is\. \[default: 0\.5\]", found["help"])
    assert found["option"] == 1.5


def test_bodies_of_requests_have_it_with_its_limits(found: dict[str, Any]) -> None:
    assert found["chat"] == found["completions"] == found["responses"] == 2
    assert "warmth\n  Input should be less than or equal to 3" in found["body"]


def test_the_openapi_document_has_it(found: dict[str, Any]) -> None:
    said = found["document"]
    assert said["description"] == "how warm the text is."
    assert {"type": "number", "minimum": 0, "maximum": 3} in said["anyOf"]


def test_the_table_of_the_documentation_has_it(found: dict[str, Any]) -> None:
    assert "| `warmth` | number 0 to 3 | `0.5` | how warm the text is. |" in found["table"]
