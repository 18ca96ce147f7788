"""Heads that NVIDIA ModelOpt made and exported, loaded here: do they compute what ModelOpt's own forward computes?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conformance import peer, results
from conformance.results import Result
from conformance.unroll import Tables, chain, unrolled
from sametoken.checkpoint.hub import read_config
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.read import LoadedHead, read_head
from sametoken.model.config import ModelConfig

PEER = "modelopt"


def compare(python: Path, work: Path) -> tuple[list[Result], dict[str, str]]:
    """All heads of `peers/modelopt_heads.py`, and the versions that made them."""
    out = work / "modelopt-heads"
    peer.run(python, "modelopt_heads.py", [out], work / "logs" / "modelopt.log")
    made = peer.answer(out / "made.json")
    target = ModelConfig.from_hf(read_config(out / "target"))
    tables = target_tables(out / "target")
    found = [
        one(name, out / name, target, tables) if outcome == "ok" else refused(name, outcome)
        for name, outcome in made["cases"].items()
    ]
    return found, made["versions"]


def target_tables(directory: Path) -> Tables:
    """What a head shares with a target whose output layer is stored beside its token vectors."""
    weights = load_file(directory / "model.safetensors")
    return Tables(weights["model.embed_tokens.weight"], weights["lm_head.weight"])


def refused(name: str, error: str) -> Result:
    """EAGLE-1 left ModelOpt's Hugging Face path: without taps it has no fusion layer and cannot be exported."""
    return results.judged(PEER, name, "its own export", error, name == "eagle1", known=True)


def one(name: str, directory: Path, target: ModelConfig, tables: Tables) -> Result:
    reference = load_file(directory.with_suffix(".safetensors"))
    loaded = read_head(directory, target, torch.float32, torch.device("cpu"), pack=False)
    with torch.no_grad():
        if isinstance(loaded.module, MedusaHeads):
            ours = loaded.module.logits(reference["last"][0])
            theirs = [reference[f"logits.{i}"][0] for i in range(len(ours))]
            return results.compare_logits(PEER, name, "logits of every head", ours, theirs)
        return eagle(name, loaded, reference, tables)


def eagle(name: str, loaded: LoadedHead, reference: dict[str, Tensor], tables: Tables) -> Result:
    """Logits of every unrolled step, and the tokens that ModelOpt's own drafting proposes."""
    head = loaded.module
    assert isinstance(head, EagleHead)
    compared = "logits of 4 unrolled steps; 4 drafted tokens"
    if name == "eagle3-input-norm":
        compared = (
            "ModelOpt's forward norms hidden states twice (input_layernorm, then hidden_norm); "
            "computed so here too, logits"
        )
        block = head.blocks[0]
        block.hidden_norm.register_forward_pre_hook(lambda module, given: (block.embed_norm(given[0]),))
    if name == "eagle3-yarn":
        compared = "ModelOpt's default exports YaRN for a head trained without; without it, logits"
        layers = head.config.layers
        head.config = replace(head.config, layers=replace(layers, rope=replace(layers.rope, kind="default")))
    tokens = reference["tokens"][0]
    features = torch.cat([reference["blocks"][tap, 0] for tap in head.config.taps], dim=-1)
    steps = sum(key.startswith("logits.") for key in reference)
    ours = unrolled(head, features, tokens, tables, steps)
    theirs = [reference[f"logits.{k}"][0, : len(logits)] for k, logits in enumerate(ours)]
    apart = results.distance(ours, theirs)
    base, *drafts = reference["drafts"][0].tolist()
    guesses = chain(head, features, torch.cat([tokens, torch.tensor([base])]), tables, len(drafts))
    known = name in ("eagle3-input-norm", "eagle3-yarn")
    holds = apart <= results.LOGITS and guesses == drafts
    return results.judged(PEER, name, compared, f"{apart:.1e}; {guesses}", holds, known=known)
