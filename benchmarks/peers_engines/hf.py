"""transformers as a child of the benchmark: `generate` plain, assisted, and with prompt lookup."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from peers_engines.protocol import Clock, serve


class Stopwatch(BaseStreamer):
    """A streamer that notes when tokens of the only row come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.clock.emit({0: value.flatten().tolist()})
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def load(path: str) -> PreTrainedModel:
    """A model in bfloat16 that no token stops."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Transformers:
    """Target and assistant in one process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.target, self.draft = load(spec["model"]), load(spec["draft"])
        self.draft.generation_config.num_assistant_tokens = spec["draft_len"]
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft.generation_config.assistant_confidence_threshold = 0.0
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self.modes: dict[str, dict[str, Any]] = {
            "plain": {},
            "draft": {"assistant_model": self.draft},
            "ngram": {"prompt_lookup_num_tokens": spec["draft_len"]},
        }

    def run(self, mode: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        ids = torch.tensor(prompts)
        stopwatch = Stopwatch()
        self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            streamer=stopwatch,
            **self.modes[mode],
        )
        return stopwatch.clock.answer(max_tokens)


if __name__ == "__main__":
    serve(Transformers)
