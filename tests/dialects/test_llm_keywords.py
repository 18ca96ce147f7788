"""`LLM` with vLLM's keywords: the engine that results is the one of our own words; others are refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
import torch

from cli_checks import Pair
from sametoken import LLM, ConfigError, SamplingParams
from sametoken.dialects.keywords import ROWS, read_keywords
from sametoken.options.engine import EngineOptions, Options
from sametoken.options.speculation import SpeculativeConfig

# The parameters of `LLM.__init__` of vLLM 0.33 with their defaults, in its order, but for the model and its revision.
DEFAULTS: dict[str, Any] = {
    "runner": "auto", "convert": "auto", "tokenizer": None, "tokenizer_mode": "auto", "skip_tokenizer_init": False,
    "trust_remote_code": False, "allowed_local_media_path": "", "allowed_media_domains": None,
    "tensor_parallel_size": 1, "dtype": "auto", "quantization": None, "tokenizer_revision": None,
    "chat_template": None, "seed": 0, "gpu_memory_utilization": 0.92, "cpu_offload_gb": 0, "offload_group_size": 0,
    "offload_num_in_group": 1, "offload_prefetch_step": 1, "offload_params": None, "enforce_eager": False,
    "enable_return_routed_experts": False, "return_sampling_mask": False, "disable_custom_all_reduce": False,
    "hf_token": None, "hf_overrides": None, "mm_processor_kwargs": None, "pooler_config": None,
    "structured_outputs_config": None, "profiler_config": None, "attention_config": None,
    "kv_cache_memory_bytes": None, "compilation_config": None, "quantization_config": None, "logits_processors": None,
    "spec_method": None, "spec_model": None, "spec_tokens": None,
}  # fmt: skip


def test_every_default_of_vllm_makes_our_default_engine() -> None:
    read = read_keywords(DEFAULTS)
    assert read.engine == {
        "tokenizer": None, "tensor_parallel_size": 1, "dtype": "auto", "chat_template": None, "cuda_graphs": True,
        "kv_cache_free_memory_fraction": 0.92,
    }  # fmt: skip
    assert (read.models, read.speculative, read.env) == ({}, {}, {})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_model_len": 4096}, {"max_seq_len": 4096}),
        ({"max_model_len": "4k"}, {"max_seq_len": 4000}),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 64}, {"max_batch_size": 3, "max_num_tokens": 64}),
        ({"gpu_memory_utilization": 0.5}, {"kv_cache_free_memory_fraction": 0.5}),
        ({"enable_prefix_caching": False}, {"kv_cache_enable_block_reuse": False}),
        ({"enable_prefix_caching": True}, {"kv_cache_enable_block_reuse": True}),
        ({"enforce_eager": True}, {"cuda_graphs": False}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.float32}, {"dtype": "float32"}),
        ({"block_size": 16, "tensor_parallel_size": 2}, {"kv_cache_tokens_per_block": 16, "tensor_parallel_size": 2}),
        ({"quantization": "int8"}, {"quantization": "int8"}),
        ({"generation_config": "vllm"}, {"generation_config": "vllm"}),
        (
            {"hf_overrides": {"rope_theta": 5.0, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}},
            {"rope_scaling": {"rope_theta": 5.0, "rope_type": "yarn", "factor": 2.0}},
        ),
        ({"rope_scaling": {"factor": 2.0}}, {"rope_scaling": {"factor": 2.0}}),
    ],
)
def test_keywords_set_what_the_command_line_sets(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    read = read_keywords(theirs)
    assert (read.engine, read.notes) == (ours, [])


def test_the_engine_has_what_vllms_words_ask_for(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(pair.target) as plain:
        expected = [each.token_ids for each in plain.generate(["one two", "three"], params)]
    theirs: dict[str, Any] = {
        "max_model_len": 64, "max_num_seqs": 2, "gpu_memory_utilization": 0.01, "swap_space": 4, "seed": 7,
        "speculative_config": {"model": pair.draft, "num_speculative_tokens": 3},
    }  # fmt: skip
    with LLM(pair.target, **theirs) as llm:
        assert (llm.max_seq_len, llm.engine.max_batch_size, llm.method) == (64, 2, "draft_target")
        assert llm.speculative == SpeculativeConfig(max_draft_len=3)
        assert [each.token_ids for each in llm.generate(["one two", "three"], params)] == expected
    assert [each.getMessage() for each in caplog.records] == ["no effect here: swap_space=4, seed=7"]


def test_drafts_are_read_from_every_spelling() -> None:
    draft = {"model": "d", "num_speculative_tokens": 5, "revision": "main"}
    read = read_keywords({"speculative_config": draft})
    assert (read.models, read.speculative) == ({"draft": "d", "draft_revision": "main"}, {"max_draft_len": 5})
    read = read_keywords({"spec_method": "ngram", "spec_tokens": 2})
    assert read.speculative == {"method": "ngram", "max_draft_len": 2}
    read = read_keywords({"speculative_model": "d", "num_speculative_tokens": 5})
    assert (read.models, read.speculative) == ({"draft": "d"}, {"max_draft_len": 5})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_modle_len": 1}, "unknown LLM keyword 'max_modle_len': did you mean 'max_model_len'\\?"),
        ({"max_seqs": 1}, "unknown LLM keyword 'max_seqs': did you mean 'max_num_seqs'\\?"),
        ({"max_model_len": "long"}, "^max_model_len long: expected a whole number"),
        ({"max_model_len": 64, "max_seq_len": 32}, "max_model_len=64 and max_seq_len both set max_seq_len"),
        ({"max_num_seqs": 0}, "^max_num_seqs=0: .*1"),
        ({"gpu_memory_utilization": 2.0}, "^gpu_memory_utilization=2.0: .*1"),
        ({"enable_lora": True}, "^enable_lora=True: adapters are not supported; merge them into the weights$"),
        ({"pipeline_parallel_size": 2}, "^pipeline_parallel_size=2: .*tensor-parallel-size"),
        ({"logits_processors": [object]}, "^logits_processors=.*: Python modules from elsewhere"),
        ({"port": 8000}, "^port=8000: port is an option of servers; leave it out$"),
        ({"override_generation_config": {"top_k": 3}}, "default_sampling is an option of servers"),
        ({"speculative_config": {"method": "custom_class"}}, "^speculative_config method = 'custom_class': "),
        ({"speculative_config": {"methud": "ngram", "model": "d"}}, "did you mean 'method'\\?"),
        ({"speculative_config": "ngram"}, "^speculative_config 'ngram': expected a JSON object"),
        ({"hf_overrides": {"rope_scaling": 5}}, "rope_scaling is 5, expected a JSON object"),
        ({"hf_overrides": {"rope_parameters": [1]}}, r"rope_parameters is \[1\], expected a JSON object"),
        ({"hf_overrides": {"architectures": ["x"]}}, "^hf_overrides .*: architectures is the checkpoint's own"),
        ({"quantization": "sixteen"}, "^quantization sixteen: a checkpoint's own quantization is found without it"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_keywords(given)


def test_drafts_without_a_part_here_are_noted() -> None:
    read = read_keywords({"speculative_config": {"method": "dspark", "num_speculative_tokens": 1}})
    assert (read.speculative, read.models) == ({}, {})
    (note,) = read.notes
    assert "block diffusion drafts are not supported" in note


def test_only_one_place_may_name_the_draft_and_its_settings(pair: Pair) -> None:
    theirs: dict[str, Any] = {"speculative_config": {"model": pair.draft}}
    with pytest.raises(ConfigError, match="draft and speculative_config both name the draft; give one of them"):
        LLM(pair.target, pair.draft, **theirs)
    theirs["speculative_config"]["num_speculative_tokens"] = 3
    with pytest.raises(ConfigError, match="speculative and speculative_config are the same setting"):
        LLM(pair.target, None, {"max_draft_len": 3}, **theirs)


def test_the_quantization_of_a_checkpoint_may_be_named() -> None:
    read = read_keywords({"quantization": "awq"})
    assert (read.engine, read.notes) == ({}, ["no effect here: quantization awq (the checkpoint states it)"])


def test_a_token_of_the_hub_reaches_the_process() -> None:
    assert read_keywords({"hf_token": "hf_1"}).env == {"HF_TOKEN": "hf_1"}
    assert read_keywords({"hf_token": True}).env == {}


def test_editors_find_keywords_that_are_read() -> None:
    own = get_type_hints(Options).keys() - get_type_hints(EngineOptions).keys()
    assert own <= ROWS.keys()
    assert {"max_model_len", "speculative_config"} <= own


def test_a_script_for_vllm_finds_its_texts(pair: Pair) -> None:
    llm, params = LLM(model=pair.target), SamplingParams(temperature=0, max_tokens=4)
    (expected,) = llm.generate("ab", params)
    (output,) = llm.generate(prompts=["ab"], sampling_params=params, use_tqdm=False)
    assert output.outputs[0].text == expected.text != ""
    talk = [{"role": "user", "content": "ab"}]
    assert llm.chat(talk, params)[0].text == llm.chat(talk, sampling_params=params, use_tqdm=False)[0].outputs[0].text
