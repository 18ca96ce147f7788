"""Exported EAGLE-3 heads, read by each engine's documented rules: the same logits, or a refusal at export.

Both ways: what is written must be served as it was trained, and what is refused must really not be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from engine_rules import READERS, EngineError
from foretoken.checkpoint.head_layouts import lay_out
from foretoken.checkpoint.heads import write_head
from foretoken.errors import UnsupportedModelError
from foretoken.model.config import ModelConfig
from foretoken.model.head_config import EagleConfig
from foretoken.model.heads import EagleHead

VOCAB, HIDDEN, LAYERS, POSITIONS = 96, 32, 8, 20
TARGET = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-6,
    }
)  # fmt: skip
OWN = replace(
    TARGET, num_layers=1, sliding_windows=(None,), norm_eps=1e-5, rope=replace(TARGET.rope, theta=20000.0)
)  # what belongs to the draft differs from the target's
PLAIN = EagleConfig(OWN, 3, (1, 3, 4), HIDDEN, VOCAB)
SMALL = replace(PLAIN, draft_vocab_size=40)
SCALED = replace(OWN.rope, kind="llama3", factor=8.0, original_max_position=16)
VARIANTS = {
    "plain": PLAIN,
    "reduced": SMALL,
    "taps": replace(SMALL, taps=(0, 2, 6)),
    "four-taps": replace(SMALL, taps=(0, 2, 4, 6)),
    "norm_before_residual": replace(SMALL, norm_before_residual=True),
    "norm_before_fc": replace(SMALL, norm_before_fc=True),
    "fc_norm": replace(SMALL, fc_norm=True),
    "3.1": replace(SMALL, fc_norm=True, norm_output=True),
    "two-blocks": replace(SMALL, layers=replace(OWN, num_layers=2, sliding_windows=(None, None))),
    "own-embed": replace(SMALL, own_embed=True),
    "window": replace(SMALL, layers=replace(OWN, sliding_windows=(5,))),
    "qk_norm": replace(SMALL, layers=replace(OWN, qk_norm=True, family="qwen3")),
    "llama3-rope": replace(SMALL, layers=replace(OWN, rope=SCALED)),
}
LAYOUTS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "llama.cpp": "hf"}
CAUTIOUS = {("sglang", "two-blocks"), ("sglang", "window")}  # refused although a flag or another name might do


def random_head(config: EagleConfig) -> EagleHead:
    generator = torch.Generator().manual_seed(1)
    head = EagleHead(config, torch.float32)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
    size = config.draft_vocab_size
    if size < VOCAB:
        head.d2t.copy_(torch.randperm(VOCAB, generator=generator)[:size].sort().values - torch.arange(size))
    return head


def causal(q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
    """Attention of one pass over T slots: what `EagleHead.forward` takes as `attend`."""
    age = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (age >= 0) & (age < (window or 1 << 30))
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1).reshape(len(age), -1)


def our_logits(head: EagleHead, blocks: Tensor, tokens: Tensor, embed: Tensor) -> list[Tensor]:
    """Logits of the last certain slot and of one recycled step after it."""
    vectors = (embed if head.embed is None else head.embed.weight)[tokens[1:]]
    hidden = head.fuse(torch.cat([blocks[tap] for tap in head.config.taps], -1))
    output = head(vectors[:POSITIONS], hidden, head.rope(torch.arange(POSITIONS)), causal)
    longer = torch.cat([hidden, head.recycle(output)[-1:]])
    again = head(vectors, longer, head.rope(torch.arange(POSITIONS + 1)), causal)
    return [head.logits(output)[-1], head.logits(again)[-1]]


@pytest.fixture(scope="module")
def given() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Outputs of a target's blocks, tokens and token vectors, all random."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        yield (
            torch.randn(LAYERS, POSITIONS, HIDDEN, generator=generator),
            torch.randint(VOCAB, (POSITIONS + 2,), generator=generator),
            torch.randn(VOCAB, HIDDEN, generator=generator),
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", READERS)
def test_what_is_written_is_served_as_it_was_trained(
    engine: str, variant: str, given: tuple[Tensor, Tensor, Tensor], tmp_path: Path
) -> None:
    head, layout = random_head(VARIANTS[variant]), LAYOUTS[engine]
    try:
        write_head(head, tmp_path, TARGET, layout=layout, target_name="some/target")
        refused = False
    except UnsupportedModelError:
        refused = True
        written = lay_out(head, TARGET, layout, "some/target")  # what would have been written
        tensors = {name: tensor.detach().contiguous() for name, tensor in written.tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(written.config))
    same = served_the_same(engine, head, given, tmp_path)
    if layout == "hf":  # written for everybody and refused to nobody: an engine may refuse it, but not serve it wrong
        assert same is not False or VARIANTS[variant].norm_output or variant == "window"
    elif refused:
        assert not same or (engine, variant) in CAUTIOUS
    else:
        assert same


def served_the_same(engine: str, head: EagleHead, given: tuple[Tensor, Tensor, Tensor], directory: Path) -> bool | None:
    """Whether an engine computes our logits for the same tokens; None if it does not load the directory."""
    try:
        served = READERS[engine].read(directory, LAYERS)
    except EngineError:
        return None
    with torch.no_grad():
        ours, theirs = our_logits(head, *given), served.logits(*given)
    if served.taps != list(head.config.taps) or not torch.equal(served.ids(), head.draft_ids):
        return False
    return all(torch.allclose(mine, other, atol=1e-4) for mine, other in zip(ours, theirs, strict=True))
