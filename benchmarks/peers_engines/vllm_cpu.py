"""vLLM's CPU build as a child of the benchmark, in its own interpreter; a mode is fixed when the engine is built."""

from __future__ import annotations

import itertools
import os
from typing import Any

from peers_engines.protocol import Clock, serve


class Vllm:
    """An `LLM`, stepped by hand so that the clock sees every emission."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(spec.get("cache_gb", 1)),
            VLLM_CPU_OMP_THREADS_BIND=f"0-{spec['threads'] - 1}",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
        )
        import torch
        import vllm
        from vllm import LLM, SamplingParams

        speculative = {"method": "draft_model", "model": spec["draft"], "num_speculative_tokens": spec["draft_len"]}
        self.version = f"{vllm.__version__}, torch {torch.__version__}"
        self.params = SamplingParams
        self.llm = LLM(
            model=spec["model"],
            dtype="bfloat16",
            max_model_len=spec["max_len"],
            max_num_seqs=spec.get("rows", 1),
            skip_tokenizer_init=True,
            **({"speculative_config": speculative} if spec["mode"] == "draft" else {}),
        )
        self.ids = itertools.count()

    def run(self, mode: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        engine = self.llm.llm_engine
        params = self.params(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        clock, rows = Clock(len(prompts)), {str(next(self.ids)): row for row in range(len(prompts))}
        for name, row in rows.items():
            engine.add_request(name, {"prompt_token_ids": prompts[row]}, params)
        while engine.has_unfinished_requests():
            got = {rows[output.request_id]: output.outputs[0].token_ids for output in engine.step()}
            clock.emit({row: tokens[len(clock.tokens[row]) :] for row, tokens in got.items()})
        return clock.answer(max_tokens)


if __name__ == "__main__":
    serve(Vllm)
