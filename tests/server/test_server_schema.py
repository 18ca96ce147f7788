"""The OpenAPI document tells the truth: whatever schemathesis makes of it, valid or not, is answered as it says.

`make test` asks every operation a few random things. `make test-thorough` adds the coverage phase, which makes one case
of every limit and type in the document, and more random cases: SAMETOKEN_EXAMPLES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM
from server_checks import MODEL, Running, running, with_pooling, with_template

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
ALL = "examples,coverage,fuzzing"  # phases
OPEN = ("ServerInfoReply", "TokenizerInfoReply")  # have the configuration besides


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # A context so short that any request is done at once.
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("brief"), "x{{ messages[-1].content }}")
    target = with_pooling(target, tmp_path_factory.mktemp("pooled"), "last", True)
    drafts = {"max_draft_len": 2, "adaptive": False}
    with running(LLM(target, tiny_pair.draft, drafts, max_batch_size=4, max_seq_len=4), max_queue=4) as server:
        yield server


@pytest.fixture(scope="module", params=["examples,fuzzing", pytest.param(ALL, marks=pytest.mark.thorough)])
def results(
    request: Any, served: Running, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What schemathesis says in some of its phases, and its report."""
    folder = tmp_path_factory.mktemp("schemathesis")
    document, report = folder / "openapi.json", folder / "report.ndjson"
    document.write_text(json.dumps(closed(served.get("/openapi.json").json())))
    examples = os.environ.get("SAMETOKEN_EXAMPLES", "1")
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", str(document), f"--url={served.url}", "--no-color",
        f"--checks={','.join(CHECKS)}", f"--phases={request.param}", f"--max-examples={examples}",
        "--warnings=off", "--generation-deterministic", "--continue-on-failure", "--request-timeout=30",
        "--report=ndjson", f"--report-ndjson-path={report}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=280, check=False), report


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with replies that hold nothing it does not name, so that what it leaves out is found."""
    document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["example"] = MODEL
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        if schema["type"] == "object" and name not in OPEN:
            schema.setdefault("additionalProperties", False)
    return document


def test_the_document_is_kept(results: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run, _ = results
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@pytest.mark.thorough
@pytest.mark.parametrize("results", [ALL], indirect=True)
def test_every_operation_was_done_and_refused(results: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    statuses: dict[str, set[int]] = {}
    for line in results[1].read_text().splitlines():
        for scenario in json.loads(line).values():
            record = scenario.get("recorder") or {}
            for each in record.get("interactions", {}).values():
                if each["response"] is not None:
                    statuses.setdefault(record["label"], set()).add(each["response"]["status_code"])
    assert len(statuses) == 23
    known = {operation for operation in statuses if "/v1/responses/" not in operation}  # ids are of earlier replies
    assert all(200 in statuses[operation] for operation in known)
    reads = {operation for operation in known if operation.startswith("POST")} - {"POST /ping"}
    assert all(400 in statuses[operation] for operation in reads)


def test_nothing_is_left_behind(results: object, served: Running) -> None:
    load = served.llm.engine.load
    assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
    assert served.post("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status_code == 200
