"""Tiny models of every family as llama.cpp's converter writes them: read as transformers computes, served alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conformance import peer, results
from conformance.results import Result
from sametoken import LLM, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import tiny_models

MAX_TOKENS = 24
LENGTHS = (18, 25, 40)  # longer than the original context of Phi 3, below which transformers takes other factors
CONTEXT = 128
THETA = 50000.0
YARN = tiny_models.rope("yarn", THETA, factor=4.0, original_max_position_embeddings=32)
# What differs from the tests' members, since the converter or llama.cpp cannot state it: biases, windows of Mixtral,
# other scales of attention. llama.cpp also ignores Phi 3's window and a base of its own for OLMo 3's windows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3.1": {}, "qwen-2": {}, "qwen-3": {}, "glm-4": {}, "phi-4-mini": {}, "qwen-3-moe": {},
    "gemma-2": {
        "head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "attention_bias": False,
    },
    "gemma-3": {
        "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None, "tie_word_embeddings": True,
        "final_logit_softcapping": None,
    },
    "olmo-2": {"attention_bias": False},
    "olmo-3": {"rope_parameters": {"sliding_attention": tiny_models.rope(theta=THETA), "full_attention": YARN}},
    "granite-3": {"attention_bias": False, "mlp_bias": False},
    "smollm-3": {"num_hidden_layers": 5, "no_rope_layers": None},
    "phi-3-long": {"sliding_window": None},
    "qwen-3-vl": {"attention_bias": False},
    "mixtral": {"sliding_window": None},
    "qwen-2-moe": {"mlp_only_layers": [], "use_sliding_window": False},
    # Of GLM the converter reads the original names of keys; DeepSeek V3's published files name their scores.
    "glm": {"head_dim": 16, "rms_norm_eps": 1e-5, "seq_length": 128},
    "glm-4.5-moe": {}, "deepseek-v2": {},
    "deepseek-v3": {
        "attention_bias": False, "scoring_func": "sigmoid",
        "rope_parameters": tiny_models.rope("yarn", mscale=0.7, mscale_all_dim=0.7, **tiny_models.YARN),
    },
    "llama-4": {
        "attention_bias": False, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
        "no_rope_layers": None, "num_hidden_layers": 5,
    },
}  # fmt: skip


def compare(name: str, work: Path, convert: Callable[..., None], serve: Callable[..., dict[str, Any]]) -> list[Result]:
    """A result for each family.

    Args:
        name: of the peer.
        convert: writes [a checkpoint, as a GGUF file] with a log; raises PeerError.
        serve: the answers of llama.cpp's server to a job of a name.
    """
    return [_compared(name, family, work / "gguf-families" / family, convert, serve) for family in FAMILIES]


def _compared(
    name: str, family: str, folder: Path, convert: Callable[..., None], serve: Callable[..., dict[str, Any]]
) -> Result:
    model = tiny_models.build(family, **FAMILIES[family])
    model.save_pretrained(folder / "model")
    # Gemma's converter counts the tokens of this file; no text is read here.
    tokens = {"model": {"vocab": {f"t{i}": i for i in range(tiny_models.VOCAB)}}, "added_tokens": []}
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokens))
    file, case, compared = folder / "model.gguf", f"family {family}", "logits of transformers; tokens of its server"
    try:
        convert([folder / "model", file], folder / "convert.log")
    except peer.PeerError as error:
        return results.judged(name, case, compared, str(error), False)
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 96, (n,), generator=random) for n in LENGTHS]
    llm = LLM(str(file), None, {"method": "none"}, dtype="float32", device="cpu", max_seq_len=CONTEXT)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=tiny_models.VOCAB)
    with torch.no_grad():
        theirs = [model(input_ids=prompt.unsqueeze(0)).logits[0].log_softmax(1) for prompt in prompts]
    found = llm.generate([prompt.tolist() for prompt in prompts], asked)
    ours = [_table(done.prompt_logprobs) for done in found]
    apart = results.distance(ours, [each[:-1] for each in theirs])
    # Token 0 ends a text for the server, which never takes it.
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logit_bias={0: -100.0})
    here = [list(done.token_ids) for done in llm.generate([prompt.tolist() for prompt in prompts], greedy)]
    answer = serve(f"family-{family}", {"model": str(file), "prompts": [prompt.tolist() for prompt in prompts]})
    if "error" in answer:
        return results.judged(name, case, compared, f"{apart:.1e}; its server: {answer['error']}", False)
    same = sum(a == b for a, b in zip(here, answer["outputs"], strict=True))
    words = f"{apart:.1e}; {same} of {len(here)} texts equal"
    return results.judged(name, case, compared, words, apart <= results.LOGITS and same == len(here))


def _table(positions: Any) -> torch.Tensor:
    """[T, V] of the log-probabilities of a prompt's tokens after the first one."""
    rows = []
    for position in positions:
        if position is not None:
            by_token = dict(position.top)
            rows.append([by_token[token] for token in range(tiny_models.VOCAB)])
    return torch.tensor(rows)
