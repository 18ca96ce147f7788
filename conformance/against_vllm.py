"""Our exports served by vLLM's CPU build: the same tokens and the same acceptance as our engine on the same prompts?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance import peer, results
from conformance.results import Result
from conformance.trained import method, slug, trained_heads
from sametoken import LLM, SamplingParams
from sametoken.checkpoint.hub import read_config
from sametoken.embedded import NAME, TARGET
from sametoken.errors import UnsupportedModelError
from sametoken.heads.read import read_head
from sametoken.heads.write import write_head
from sametoken.model.config import ModelConfig
from sametoken.prompts.sources import BUILT_IN, as_turn

PEER = "vllm"
DRAFT_LEN = 4
MAX_TOKENS = 96
PROMPTS = 12
APART = 0.1  # of acceptance length, the bonus token included


@dataclass(frozen=True)
class Run:
    """What an engine gave: token ids per prompt, forwards with a draft, and accepted tokens, in all."""

    outputs: list[list[int]]
    drafts: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(1, self.drafts)


class Vllm:
    """Starts vLLM once per question: its drafts are fixed when it is built."""

    def __init__(self, python: Path, work: Path) -> None:
        self.python, self.work = python, work
        self.versions: dict[str, str] = {}

    def run(self, name: str, prompts: list[list[int]], speculative: dict[str, Any] | None) -> Run | str:
        """Its answers, or its error."""
        job, done = self.work / "vllm-jobs" / f"{name}.json", self.work / "vllm-jobs" / f"{name}.done.json"
        job.parent.mkdir(parents=True, exist_ok=True)
        asked = {"model": str(TARGET), "dtype": "float32", "max_model_len": 512, "max_tokens": MAX_TOKENS}
        job.write_text(json.dumps({**asked, "prompts": prompts, "speculative": speculative}))
        peer.run(self.python, "vllm_serve.py", [job, done], self.work / "logs" / f"vllm-{name}.log")
        answer = peer.answer(done)
        self.versions = answer["versions"]
        return answer["error"] if "error" in answer else Run(answer["outputs"], answer["drafts"], answer["accepted"])


def compare(python: Path, work: Path) -> tuple[list[Result], dict[str, str]]:
    """Every trained head in every layout that vLLM reads."""
    vllm, prompts = Vllm(python, work), prompt_ids()
    target = ModelConfig.from_hf(read_config(TARGET))
    found = [judge("none", "no draft", ours(None, prompts), vllm.run("plain", prompts, None))]
    for name, directory in trained_heads(work).items():
        head = read_head(directory, target, torch.float32, "cpu", pack=False).module
        mine = ours(directory, prompts)
        for layout in ("vllm", "speculators"):
            exported = work / "vllm-heads" / f"{slug(name)}-{layout}"
            try:
                write_head(head, exported, target, layout=layout, target_name=NAME)
            except UnsupportedModelError:
                continue  # `tests/heads/test_head_engines.py` checks what is refused
            drafts = {"method": method(name), "model": str(exported), "num_speculative_tokens": DRAFT_LEN}
            found.append(judge(name, f"export --to {layout}", mine, vllm.run(exported.name, prompts, drafts)))
    return found, vllm.versions


def prompt_ids() -> list[list[int]]:
    """Built-in prompts as the embedded target reads them."""
    tokenizer = LLM(NAME).tokenizer
    turns = [as_turn(turn).messages for turn in BUILT_IN[:PROMPTS]]
    return [tokenizer.encode(tokenizer.apply_chat_template(turn), add_special_tokens=False) for turn in turns]


def ours(head: Path | None, prompts: list[list[int]]) -> Run:
    """What our engine gives: chains of fixed length, one prompt at a time, as vLLM is asked to."""
    speculative = {"max_draft_len": DRAFT_LEN, "adaptive": False} if head else None
    llm = LLM(NAME, draft=str(head) if head else None, speculative=speculative, dtype="float32", max_batch_size=1)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = llm.generate(prompts, params)
    drafts = sum(sum(answer.speculation.drafted_lengths[1:]) for answer in answers)
    accepted = sum(answer.speculation.accepted for answer in answers)
    return Run([list(answer.token_ids) for answer in answers], drafts, accepted)


def judge(name: str, way: str, mine: Run, other: Run | str) -> Result:
    """The same tokens, and acceptance lengths within APART."""
    drafted = f"`{way}`: tokens; acceptance length of chains of {DRAFT_LEN}"
    compared = "tokens without a draft" if way == "no draft" else drafted
    if isinstance(other, str):
        return Result(PEER, name, compared, other, "differs")
    same = sum(a == b for a, b in zip(mine.outputs, other.outputs, strict=True))
    found = f"{same} of {len(mine.outputs)} texts equal"
    if other.drafts:
        found += f"; {mine.acceptance_length:.3f} here, {other.acceptance_length:.3f} there"
    holds = same == len(mine.outputs) and abs(mine.acceptance_length - other.acceptance_length) <= APART
    return results.judged(PEER, name, compared, found, holds)
