"""Our exports read by the rules of the engines they are for give the head that was exported; the rest is refused.

Oracle: `engine_rules`, restated from the engines' loaders.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_rules import FLAGS, READERS, EngineError, Read
from head_files import HIDDEN, LAYERS, TARGET, VOCAB, eagle_1, eagle_3, layers, medusa, random_head, read_files
from sametoken.errors import UnsupportedModelError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.names import eagle_tensors
from sametoken.heads.registry import head_kind
from sametoken.heads.write import write_head

NEWER: dict[str, EagleConfig] = {
    "plain": eagle_3(),
    "whole vocabulary": eagle_3(draft_vocab_size=VOCAB),
    "the target's output layer": eagle_3(draft_vocab_size=VOCAB, own_head=False),
    "token vectors": eagle_3(own_embed=True),
    "other taps": eagle_3(taps=(0, 5, 7)),
    "four taps": eagle_3(taps=(0, 2, 5, 7), fc_norm=True),
    "3.1": eagle_3(fc_norm=True, norm_output=True),
    "norm_before_fc": eagle_3(norm_before_fc=True),
    "norm_before_residual": eagle_3(norm_before_residual=True),
    "both norms": eagle_3(norm_before_fc=True, fc_norm=True),
    "no last norm": eagle_3(last_norm=False),
    "two blocks": eagle_3(layers=layers(2)),
    "qk norm": eagle_3(layers=layers(qk_norm=True)),
    "biases": eagle_3(layers=layers(qkv_bias=True, out_bias=True)),
    "qkv bias": eagle_3(layers=layers(qkv_bias=True)),
    "mlp bias": eagle_3(layers=layers(mlp_bias=True)),
}
OLDER: dict[str, EagleConfig] = {
    "plain": eagle_1(fc_bias=False),
    "fc bias": eagle_1(),
    "qkv bias": eagle_1(fc_bias=False, layers=layers(qkv_bias=True)),
    "biases": eagle_1(fc_bias=False, layers=layers(qkv_bias=True, out_bias=True)),
    "two blocks": eagle_1(fc_bias=False, layers=layers(2)),
    "input norm": eagle_1(fc_bias=False, input_norm=True),
    "last norm": eagle_1(fc_bias=False, last_norm=True),
    "output layer": eagle_1(fc_bias=False, own_head=True),
    "token vectors": eagle_1(fc_bias=False, own_embed=True),
}
CELLS = [(layout, version, name) for layout, version in READERS for name in (NEWER if version == 3 else OLDER)]


def read(layout: str, version: int, head: Any, place: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> Read:
    if monkeypatch is not None:
        monkeypatch.setattr("sametoken.heads.eagle.drafts.Eagle.refusals", lambda *_: [])
    write_head(head, place, TARGET, layout=layout, target_name="some/target")
    config, tensors = read_files(place)
    return READERS[layout, version](config, tensors, LAYERS)


def same(got: Read, head: Any) -> bool:
    """Whether an engine computes what was trained."""
    config, weights = head.config, dict(eagle_tensors(head, head.config))
    if config.version == 1 and "fc.bias" not in weights and "fc.bias" in got.weights:
        assert not got.weights["fc.bias"].any()
        weights["fc.bias"] = got.weights["fc.bias"]
    flags = config.version == 1 or got.flags == {name: getattr(config, name) for name in FLAGS}
    equal = got.weights.keys() == weights.keys() and all(torch.equal(got.weights[n], weights[n]) for n in weights)
    ids = head.draft_ids if got.draft_ids is None else got.draft_ids
    return equal and flags and got.taps == config.taps and torch.equal(ids, head.draft_ids)


@pytest.mark.parametrize(("layout", "version", "name"), CELLS)
def test_an_engine_reads_what_was_trained_or_it_is_refused(
    layout: str, version: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head((NEWER if version == 3 else OLDER)[name])
    if not head_kind(head.config).refusals(head.config, layout):
        assert same(read(layout, version, head, tmp_path / "head"), head)
        return
    with pytest.raises(UnsupportedModelError):
        write_head(head, tmp_path / "head", TARGET, layout=layout, target_name="some/target")
    # The refusal has a reason: written all the same, the engine refuses it or computes something else.
    try:
        got = read(layout, version, head, tmp_path / "head", monkeypatch)
    except EngineError:
        return
    assert not same(got, head)


def test_a_bias_of_zeros_is_dropped_for_vllm(tmp_path: Path) -> None:
    head = random_head(eagle_1())
    head.fc.bias.data.zero_()
    got = read("vllm", 1, head, tmp_path / "head")
    assert "fc.bias" not in got.weights


@pytest.mark.parametrize("layout", ["vllm", "sglang", "trtllm", "hf"])
def test_our_ids_agree_in_both_conventions(layout: str, tmp_path: Path) -> None:
    write_head(random_head(eagle_3()), tmp_path / "head", TARGET, layout=layout, target_name="t")
    config, _ = read_files(tmp_path / "head")
    key = "eagle_aux_hidden_state_layer_ids"
    assert config[key] == [2, 4, 5]
    assert config["eagle_config"][key] == [1, 3, 4]


@pytest.mark.parametrize("layout", ["hf", "vllm", "sglang", "trtllm", "speculators"])
def test_rotation_is_the_drafts_in_both_spellings(layout: str, tmp_path: Path) -> None:
    write_head(random_head(eagle_3()), tmp_path / "head", TARGET, layout=layout, target_name="t")
    config, _ = read_files(tmp_path / "head")
    blocks = config.get("transformer_layer_config", config)
    assert blocks["rope_theta"] == blocks["rope_parameters"]["rope_theta"] == 10000.0
    assert blocks["max_position_embeddings"] == 48
    assert "rope_scaling" not in blocks


def test_transformers_reads_the_blocks_as_we_do(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    write_head(random_head(eagle_3()), tmp_path / "head", TARGET, target_name="t")
    read = LlamaConfig.from_pretrained(tmp_path / "head")
    assert (read.hidden_size, read.num_hidden_layers, read.head_dim) == (HIDDEN, 1, 4)
    assert read.rope_parameters["rope_theta"] == 10000.0
    assert read.draft_vocab_size == 12


def test_medusa_names_of_both_layouts(tmp_path: Path) -> None:
    head = random_head(medusa(num_heads=2))
    write_head(head, tmp_path / "hf", TARGET, target_name="base/model")
    config, tensors = read_files(tmp_path / "hf")
    assert set(tensors) == {
        f"{i}.{name}" for i in range(2) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    assert config["base_model_name_or_path"] == "base/model"
    write_head(head, tmp_path / "vllm", TARGET, layout="vllm", target_name="t")
    config, tensors = read_files(tmp_path / "vllm")
    linears = {f"blocks.{i}.layers.0.{kind}" for i in range(2) for kind in ("weight", "bias")}
    assert set(tensors) == linears | {f"lm_heads.{i}.weight" for i in range(2)}
    assert (config["model_type"], config["medusa_fc_bias"]) == ("medusa", True)


@pytest.mark.parametrize("layout", ["sglang", "trtllm", "speculators"])
def test_medusa_is_refused_by_name(layout: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="Medusa"):
        write_head(random_head(medusa()), tmp_path / "head", TARGET, layout=layout, target_name="t")


# The table in the docs

ROWS: dict[str, Any] = {
    "EAGLE-3, three taps, one block": eagle_3(),
    "`fc_norm`, `norm_output` (3.1), `norm_before_fc`": eagle_3(norm_before_fc=True, norm_output=True),
    "`norm_before_fc` with `fc_norm`": NEWER["both norms"],
    "`norm_before_residual`": NEWER["norm_before_residual"],
    "another number of taps": eagle_3(taps=(1, 2)),
    "several blocks": NEWER["two blocks"],
    "`q_norm`, `k_norm`": NEWER["qk norm"],
    "attention biases (all four)": NEWER["biases"],
    "MLP biases": NEWER["mlp bias"],
    "token vectors of its own": NEWER["token vectors"],
    "narrower or wider than the target": replace(
        eagle_3(layers=layers(hidden_size=8), own_embed=True), target_hidden_size=HIDDEN
    ),
    "the target's output layer": NEWER["the target's output layer"],
    "sliding window": eagle_3(layers=layers(sliding_windows=(5,))),
    "EAGLE-1 without a bias of `fc`": OLDER["plain"],
    "EAGLE-1 with a bias of `fc`": OLDER["fc bias"],
    "EAGLE-1 with norms that SafeAILab's has not": OLDER["last norm"],
    "Medusa": medusa(),
}


def test_the_table_in_the_docs_is_what_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.partition("| part of the head |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [row[0] for row in cells] == list(ROWS)
    for name, *words in cells:
        for layout, word in zip(("vllm", "sglang", "trtllm", "speculators"), words, strict=True):
            exception = (name, layout) == ("token vectors of its own", "trtllm")  # says when it is accepted
            refused = bool(head_kind(ROWS[name]).refusals(ROWS[name], layout))
            assert word.startswith("no") == refused or exception, (name, layout)
