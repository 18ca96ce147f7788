"""Our exports, loaded by speculators as they are or through its converter: does its own forward compute the same?"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conformance import peer, results
from conformance.against_modelopt import target_tables
from conformance.our_heads import random_head, variants
from conformance.results import Result
from conformance.unroll import Chains, Tables, unrolled
from sametoken.checkpoint.hub import read_config
from sametoken.errors import SametokenError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.write import write_head
from sametoken.model.config import ModelConfig

PEER = "speculators"
STEPS = 4
# What its converter, which knows one Llama layer, drops or refuses; loading our own export is not limited by it.
NOT_CONVERTED = ("two layers", "sliding window", "Qwen 3 layers")
# Differences of its own that were found, and what makes ours differ in the same way.
DROPPED_NORMS = "its converter drops the norms before fc; with ones in their place, logits"
FIXED_WINDOW = "its unrolled steps measure the window from the chain's first slot; measured so, logits"


def compare(python: Path, work: Path) -> tuple[list[Result], dict[str, str]]:
    """Every variant through every way in, beside the target and the states that ModelOpt's side has left."""
    out, states = work / "speculators-heads", work / "modelopt-heads"
    out.mkdir(parents=True, exist_ok=True)
    target_directory = states / "target"
    target = ModelConfig.from_hf(read_config(target_directory))
    reference, tables = load_file(states / "eagle3.safetensors"), target_tables(target_directory)
    found: list[Result] = []
    jobs: list[dict[str, Any]] = []
    heads: dict[str, EagleHead] = {}
    for seed, (name, config) in enumerate(variants(target).items()):
        head = random_head(config, seed)
        for layout in ("speculators", "hf", "vllm"):
            if layout != "speculators" and name in NOT_CONVERTED:
                continue
            job = f"{name}/{layout}"
            directory = out / job.replace(" ", "-").replace("/", "-")
            try:
                write_head(head, directory, target, layout=layout, target_name=str(target_directory))
            except SametokenError as error:
                found.append(Result(PEER, name, f"export --to {layout}", str(error)[:200], "differs"))
                continue
            heads[job] = head
            jobs.append(
                {
                    "name": job, "head": str(directory), "states": str(states / "eagle3.safetensors"),
                    "verifier": str(target_directory), "out": f"{directory}.safetensors",
                    "convert": None if layout == "speculators" else arguments(config),
                }
            )  # fmt: skip
    (out / "jobs.json").write_text(json.dumps(jobs, indent=1))
    peer.run(python, "speculators_logits.py", [out / "jobs.json", out / "done.json"], work / "logs" / "speculators.log")
    done = peer.answer(out / "done.json")
    for job in jobs:
        name = job["name"]
        found.append(judge(job, done["cases"][name], heads[name], (reference, tables)))
    return found, done["versions"]


def our_logits(
    head: EagleHead, reference: dict[str, Tensor], tables: Tables, chains: Chains | None = None
) -> list[Tensor]:
    features = torch.cat([reference["blocks"][tap, 0] for tap in head.config.taps], dim=-1)
    with torch.no_grad():
        return unrolled(head, features, reference["tokens"][0], tables, STEPS, chains)


def arguments(config: EagleConfig) -> dict[str, Any]:
    """What its converter has to be told, because it does not read it from a checkpoint."""
    told: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps]}
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, flag):
            told[flag] = True
    return told


def judge(job: dict[str, Any], outcome: str, head: EagleHead, given: tuple[dict[str, Tensor], Tables]) -> Result:
    """Compares the logits of a job, with a difference of speculators' own made here too where one is known."""
    name, layout = job["name"].split("/")
    way = "loads `export --to speculators`" if job["convert"] is None else f"converts `export --to {layout}`"
    if outcome != "ok":
        return Result(PEER, name, way, outcome, "differs")
    theirs = load_file(job["out"])
    config, windows = head.config, any(head.config.layers.sliding_windows)
    dropped = job["convert"] is not None and (config.norm_before_fc or config.fc_norm)
    known = DROPPED_NORMS if dropped else FIXED_WINDOW if windows else None
    ours = our_logits(without_fusion_norms(head) if dropped else head, *given, Chains(moving_window=not windows))
    apart = results.distance(ours, [theirs[f"logits.{k}"][0] for k in range(STEPS)])
    compared = f"{way}; {known or f'logits of {STEPS} unrolled steps'}"
    return results.judged(PEER, name, compared, f"{apart:.1e}", apart <= results.LOGITS, known=known is not None)


def without_fusion_norms(head: EagleHead) -> EagleHead:
    """A copy whose norms before the fusion have no weights."""
    plain = copy.deepcopy(head)
    for norm in [plain.input_norm, *(plain.fc_norms or [])]:
        if norm is not None:
            norm.weight.data.fill_(1.0)
    return plain
