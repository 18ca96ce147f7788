"""sametoken as a child of the benchmark: one engine, every mode chosen by the request."""

from __future__ import annotations

from typing import Any

import torch

import sametoken
from peers_engines.protocol import Clock, serve
from sametoken import LLM, SamplingParams
from sametoken.engine.report import StepReport
from sametoken.kernels.cpu.variant import library
from sametoken.options.sampling import RequestSpeculation

MODES = {
    "auto": RequestSpeculation(method="draft_target", adaptive=True),
    "plain": RequestSpeculation(enabled=False),
    "draft": RequestSpeculation(method="draft_target", adaptive=False),
    "ngram": RequestSpeculation(method="ngram", adaptive=False),
}


class Ours:
    """An `LLM` that drafts as each request says."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        # llama.cpp's quantised cells have an 8-bit draft too.
        quantized = {"quantization": spec.get("quantization", "none")}
        if spec["dtype"] != "bf16":
            quantized["draft_quantization"] = "int8"
        self.llm = LLM(
            spec["model"],
            spec["draft"],
            {"max_draft_len": spec["draft_len"]},
            dtype="bfloat16",
            max_batch_size=spec.get("rows", 1),
            max_num_tokens=spec.get("step_tokens", 512),
            max_seq_len=spec["max_len"],
            **quantized,
        )
        kernels = library()
        self.version = f"{sametoken.__version__}, compiled kernels: {kernels.name if kernels else 'none'}"

    def run(self, mode: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, speculative=MODES[mode])
        clock = Clock(len(prompts))

        def note(report: StepReport) -> None:
            clock.emit({emission.request.index: emission.token_ids for emission in report.emissions})

        self.llm.engine.reports.append(note)
        try:
            self.llm.generate(prompts, params)
        finally:
            self.llm.engine.reports.remove(note)
        return clock.answer(max_tokens)


if __name__ == "__main__":
    serve(Ours)
