"""Directories in bfloat16: their numbers are the gguf library's, their log-probabilities transformers' in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from real_files import bf16, gguf, needs_models
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from sametoken import LLM, SamplingParams

pytestmark = needs_models
TEXT = (
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot, *rest = items\n"
    "    return quicksort([x for x in rest if x < pivot]) + [pivot] + quicksort([x for x in rest if x >= pivot])\n\n"
    "The quick brown fox jumps over the lazy dog. Der schnelle braune Fuchs springt über den faulen Hund."
)
ROWS = 1024  # of each tensor: numpy is slow
NEAR = 2e-3  # of log-probabilities in float32
# Names in a GGUF file whose rows lie as in a checkpoint (those of Llama's q and k are in another order).
PARTS = {
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@pytest.mark.parametrize("name", ["smollm2", "coder05"])
def test_numbers_are_the_gguf_librarys(name: str) -> None:
    reader = {tensor.name: tensor for tensor in GGUFReader(gguf(name)).tensors}
    compared = 0
    with safe_open(Path(bf16(name)) / "model.safetensors", "pt") as made:
        pairs = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
        for layer in (0, 7):
            pairs |= {f"blk.{layer}.{a}.weight": f"model.layers.{layer}.{b}.weight" for a, b in PARTS.items()}
        for theirs, ours in pairs.items():
            rows = reader[theirs].data[:ROWS]
            expected = torch.from_numpy(dequantize(rows, reader[theirs].tensor_type).copy())
            assert torch.equal(made.get_tensor(ours)[:ROWS], expected.to(torch.bfloat16)), ours
            compared += expected.numel()
    assert compared > 5e6


@pytest.mark.parametrize("name", ["smollm2", "coder05"])
def test_log_probabilities_are_transformers(name: str) -> None:
    with LLM(bf16(name), None, {"method": "none"}, dtype="float32", max_batch_size=1, max_seq_len=256) as llm:
        found = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))[0]
    oracle = AutoModelForCausalLM.from_pretrained(bf16(name), dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([found.prompt_token_ids])).logits[0].log_softmax(-1)
    assert found.prompt_logprobs is not None
    places = [place for place in found.prompt_logprobs if place is not None]
    assert len(places) == len(found.prompt_token_ids) - 1 > 60
    for at, place in enumerate(places):
        for token, logprob in (*place.top, (place.token_id, place.logprob)):
            assert abs(expected[at, token].item() - logprob) < NEAR, (at, token)
        best = expected[at].topk(2).values
        assert place.top[0][0] == int(expected[at].argmax()) or best[0] - best[1] < NEAR
    assert found.token_ids == [int(expected[-1].argmax())]
