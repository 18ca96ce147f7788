"""Runs in the environment of vLLM's CPU build: serves prompts greedily, with or without a draft.

    python vllm_serve.py JOB.json OUT.json

JOB.json: {"model", "dtype", "max_tokens", "prompts": lists of ids, "speculative": vLLM's speculative_config or null}.
OUT.json: {"versions", "outputs": lists of ids, "drafts", "drafted", "accepted", "per_position"}, or {"error"}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

from vllm import LLM, SamplingParams

COUNTERS = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    options = {"speculative_config": job["speculative"]} if job["speculative"] else {}
    llm = LLM(
        model=job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"], max_num_seqs=1, enforce_eager=True,
        skip_tokenizer_init=True, disable_log_stats=False, enable_prefix_caching=False, **options,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = llm.generate(prompts, params, use_tqdm=False)
    found: dict[str, Any] = {"outputs": [list(answer.outputs[0].token_ids) for answer in answers]}
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    for name, counter in COUNTERS.items():
        metric = metrics.get(f"vllm:spec_decode_{counter}")
        found[name] = metric.value if metric is not None else 0
    per_position = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    found["per_position"] = list(per_position.values) if per_position is not None else []
    return found


def main(job: Path, out: Path) -> None:
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    try:
        answer = serve(json.loads(job.read_text()))
    except Exception as error:  # what a peer refuses is a result
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    out.write_text(json.dumps({"versions": versions, **answer}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
