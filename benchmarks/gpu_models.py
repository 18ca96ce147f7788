"""Models of a given shape in memory, a text that rounding cannot change, and a draft that knows it up to a chance.

Random weights give a step its real cost, but their text flips at the first rounding. Here the blocks add little to the
residual stream and the head is the embedding with its rows along one great cycle: every token has one clear successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sametoken import LLM
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.device import Proposer, proposers
from sametoken.drafters.tree import chain_of
from sametoken.embedded import TARGET
from sametoken.engine.captured import CapturedSteps
from sametoken.engine.load import Loaded
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.options.speculation import NO_DRAFT
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.speculation.draft import PADDING, Draft, chain_parents
from sametoken.speculation.noise import noise
from sametoken.speculation.sampling import Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
CONTEXT = 2048
REPLAY = "replay"
ROWS = 64 if torch.cuda.is_available() else 8  # of an engine
PAGED = (16 if ROWS > 8 else 4) * CONTEXT  # tokens that its cache holds
SEED = 11


def facts(shape: str) -> ModelConfig:
    return ModelConfig.from_hf(
        {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": CONTEXT, "eos_token_id": 0, **SHAPES[shape]}
    )


def random_decoder(shape: str, device: torch.device, *, steady: bool) -> Decoder:
    """A bfloat16 Llama of this shape; `steady` gives it the text that rounding cannot change."""
    with torch.device(device):
        decoder = Decoder(facts(shape), torch.bfloat16)
    torch.manual_seed(SEED)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        weight.normal_(std=0.02)
        if steady and name.rsplit(".", 2)[-2] in ("out", "down"):
            weight.mul_(1e-3)
    assert decoder.head is not None
    if steady:
        decoder.embed.weight.normal_()
        cycle = torch.randperm(decoder.config.vocab_size, device=device)
        decoder.head.weight[cycle.roll(-1)] = decoder.embed.weight[cycle]
    if device.type == "cpu":
        for module in decoder.modules():
            if hasattr(module, "pack"):
                module.pack()
    return decoder


class Replay(Drafter):
    """Proposes the known text; each token is right with a chance of its own position, whoever asks and when.

    It costs next to nothing, so what is measured with it is the target's side of speculation.

    Args:
        truth: prompt and output, the same for all rows.
        depth: tokens of every guess.
    """

    taps: tuple[int, ...] = ()
    namespace = ""
    lag = 0

    def __init__(self, truth: Sequence[int], depth: int, chance: float, device: torch.device) -> None:
        self.depth = self.nodes = depth
        tokens = torch.tensor([*truth, *[0] * (2 * depth + 2)], device=device)
        position = torch.arange(len(tokens), device=device)
        draw = noise(torch.full_like(position, SEED), position, torch.zeros_like(position).unsqueeze(1)).squeeze(1)
        right = torch.exp(-draw) < chance  # an exponential variate turned back into a uniform one
        self._guesses = torch.where(right, tokens, (tokens + 1) % (int(tokens.max()) + 1))
        self._ahead = torch.arange(1, depth + 1, device=device)
        self.lengths: dict[int, int] = {}

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        self.lengths[row] = len(cached)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        for row, certain in zip(rows, tokens, strict=True):
            self.lengths[row] += len(certain)

    def release(self, row: int) -> None:
        del self.lengths[row]

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: object = None,
    ) -> Proposed:  # fmt: skip
        lengths = torch.tensor([self.lengths[row] for row in rows], device=self._ahead.device)
        guesses = self.after(lengths)
        guesses = guesses.masked_fill(self._ahead > torch.tensor(limits, device=guesses.device).unsqueeze(1), PADDING)
        roots = torch.tensor(pending, device=guesses.device).unsqueeze(1)
        parents = chain_parents(len(rows), 1 + self.depth, guesses.device)
        return Proposed.of(Draft(torch.cat([roots, guesses], 1), parents))

    def captured(self) -> Proposer:
        return CapturedReplay(self)

    def after(self, lengths: Tensor) -> Tensor:
        """[B, K] guesses after pending tokens at positions `lengths` [B]."""
        at = (lengths.unsqueeze(1) + self._ahead).clamp(max=self._guesses.shape[0] - 1)
        return self._guesses.index_select(0, at.flatten()).view_as(at)


class CapturedReplay(Proposer):
    """The same inside a captured step."""

    def __init__(self, replay: Replay) -> None:
        self._replay, self.depth = replay, replay.depth
        self.nodes = self.slots = 1 + replay.depth

    def guess(self, graph_slots: GraphSlots, sampling: Sampling, keys: int) -> Draft:
        tokens = torch.cat([graph_slots.pending.unsqueeze(1), self._replay.after(graph_slots.lengths)], dim=1)
        return chain_of(tokens, graph_slots.longest).draft

    def committed(self, row: int, start: int, tokens: Sequence[int]) -> None:
        self._replay.lengths[row] = start + len(tokens)


def assemble(decoder: Decoder, *, ahead: bool, depth: int = 4) -> LLM:
    """An engine around a model in memory.

    Args:
        ahead: whether whole steps run ahead of the host, as graphs where there are any.
    """
    loaded = Loaded(decoder, None, load_tokenizer(TARGET), CONTEXT, sampling={}, pooling=None)
    with patch("sametoken.engine.llm.load_models", lambda *_: loaded):
        llm = LLM(
            "in memory", None, {"max_draft_len": depth}, kv_cache={"max_tokens": PAGED}, max_batch_size=ROWS,
            cuda_graphs=ahead,
        )  # fmt: skip
    engine = llm.engine
    if ahead and engine.captured is None:  # a device without graphs: the same steps, done one by one
        limit = engine.scheduler.max_num_tokens
        engine.captured = CapturedSteps(engine.runner, proposers(engine.drafters, NO_DRAFT), limit)
    return llm


def replaying(llm: LLM, truth: Sequence[int], depth: int, chance: float) -> LLM:
    """The same engine with a replayed draft."""
    replay = Replay(truth, depth, chance, llm.engine.runner.device)
    llm.engine.drafters[REPLAY] = replay
    if llm.engine.captured is not None:
        # A graph that was captured with another draft's tensors must not be replayed for this one.
        llm.engine.captured = CapturedSteps(
            llm.engine.runner,
            {**llm.engine.captured.proposers, REPLAY: replay.captured()},
            llm.engine.scheduler.max_num_tokens,
        )
    return llm
