"""What checkpoints state about their quantised layers: which layer is stored how, and which is not quantised."""

from __future__ import annotations

from typing import Any

import pytest

from sametoken.checkpoint.quantised.scheme import FLOAT, INTEGER, Scheme, WeightScheme, read_scheme
from sametoken.errors import CheckpointError

QUERY, UP, HEAD = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj", "lm_head"


def scheme(stated: dict[str, Any] | None, modelopt: dict[str, Any] | None = None) -> Scheme:
    found = read_scheme({} if stated is None else {"quantization_config": stated}, modelopt)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("pattern", "ignored"),
    [
        ("lm_head", {HEAD}),
        (QUERY, {QUERY}),
        ("model.layers.3.self_attn", {QUERY}),
        ("*self_attn*", {QUERY}),
        ("model.layers.3*", {QUERY, UP}),
        ("re:.*up_proj$", {UP}),
        ("re:up_proj", set()),
        ("up_proj", {UP}),
        ("model.layers.33", set()),
    ],
)
def test_ignored_layers_are_named_in_every_tools_way(pattern: str, ignored: set[str]) -> None:
    found = scheme({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [pattern]})
    assert {name for name in (QUERY, UP, HEAD) if found.layer(name) is None} == ignored


def test_model_optimizers_own_file_counts_where_the_configuration_says_nothing() -> None:
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    found = scheme(None, {"producer": {"name": "modelopt"}, "quantization": inner})
    assert found.layer(UP) == WeightScheme(FLOAT, 4, 16)
    assert found.layer(HEAD) is None
    assert scheme({"quant_method": "fp8"}, {"quantization": inner}).layer(UP) == WeightScheme(FLOAT, 8)
    assert read_scheme({}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}) is None


def test_layers_of_one_model_may_differ() -> None:
    layers = {QUERY: {"quant_algo": "FP8"}, UP: {"quant_algo": "NVFP4", "group_size": 16}}
    found = scheme({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert (found.layer(QUERY), found.layer(UP), found.layer(HEAD)) == (
        WeightScheme(FLOAT, 8),
        WeightScheme(FLOAT, 4, 16),
        None,
    )
    assert found.bits == 4
    every = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "targets": ["Linear"]}
    some = {
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
        "targets": ["re:.*up_proj"],
    }
    compressed = scheme({"quant_method": "compressed-tensors", "config_groups": {"a": every, "b": some}})
    assert (compressed.layer(QUERY), compressed.layer(UP)) == (
        WeightScheme(INTEGER, 8, -1),
        WeightScheme(INTEGER, 4, 64),
    )


@pytest.mark.parametrize(("rows", "expected"), [({"num_bits": 8, "type": "int"}, True), (None, False)])
def test_rows_are_rounded_only_where_that_is_stated(rows: dict[str, Any] | None, expected: bool) -> None:
    group = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "input_activations": rows}
    layer = scheme({"quant_method": "compressed-tensors", "config_groups": {"a": group}}).layer(UP)
    assert layer is not None
    assert layer.integer_rows is expected


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"quant_method": "gguf"}, "types is"),
        ({"quant_method": "gguf", "types": ["["]}, "types is"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm", "modules_to_not_convert": ["re:("]}, "no regular expr"),
    ],
)
def test_a_wrong_list_is_refused_in_words(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        scheme(stated)
