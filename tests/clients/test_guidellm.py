"""guidellm loads the server: every request succeeds, and its sums of tokens are what /metrics counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clients_checks import PYTHON, Served, said

REQUESTS, TOKENS = 20, 24


def loaded(served: Served, place: Path, path: str) -> tuple[dict[str, Any], dict[str, float]]:
    """What guidellm counted in a run, and by how much the server's counters grew in it."""
    before, file = served.counts(), place / "report.json"
    said(
        PYTHON / "guidellm", "run", "--disable-console", "--output", f"kind=json,path={file}",
        "--backend", f"kind=openai_http,target={served.url},model={served.model},request_format={path}",
        "--tokenizer", f"kind=huggingface_auto,model={served.directory}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}",
        cwd=place, HF_HUB_OFFLINE="1", HF_HOME=str(place),
    )  # fmt: skip
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    return benchmark["metrics"], {name: value - before.get(name, 0) for name, value in served.counts().items()}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_its_counts_are_the_servers(served: Served, tmp_path: Path, path: str) -> None:
    for attempt in range(3):
        (place := tmp_path / str(attempt)).mkdir()
        counted, grown = loaded(served, place, path)
        assert sum(grown[name] for name in grown if "request_errors_total" in name) == 0
        if counted["request_totals"]["total"] == REQUESTS:  # its report now and then lacks a request without a word
            break
    assert counted["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert grown["sametoken_request_success_total{length}"] == REQUESTS
    sums = {kind: counted[f"{kind}_token_count"]["successful"]["total_sum"] for kind in ("prompt", "output")}
    assert sums["output"] == grown["sametoken_generation_tokens_total"] == REQUESTS * TOKENS
    assert sums["prompt"] == grown["sametoken_prompt_tokens_total"] >= REQUESTS * 32
    assert grown["sametoken_spec_decode_num_accepted_tokens_total"] > 0
