"""One speculative configuration for four engines: whole commands, keys that the engine knows, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_flags import (
    SGLANG_ALGORITHMS,
    SGLANG_FLAGS,
    TRTLLM_CACHE_KEYS,
    TRTLLM_FLAGS,
    TRTLLM_KEYS,
    TRTLLM_SPECULATIVE,
    VLLM_FLAGS,
    VLLM_KEYS,
    VLLM_METHODS,
)

from sametoken import embedded
from sametoken.deploy.plan.engines import ENGINES, INFRASTRUCTURE, ranges
from sametoken.deploy.plan.launch import Launch, Wanted
from sametoken.errors import ConfigError
from sametoken.options.serving import OPTIONS
from sametoken.options.speculation import SpeculativeConfig

MODEL, HEAD = "org/target", "org/head"
SCHEDULE = {4: 3, 8: 2}


def wanted(method: str | None = "eagle3", **stated: Any) -> Wanted:
    speculation = {name: stated[name] for name in stated if name in SpeculativeConfig.model_fields}
    draft = HEAD if method in ("eagle3", "eagle", "medusa", "draft_target") else None
    keys = bool(stated.pop("api_key", ()))
    return Wanted(MODEL, draft, method, SpeculativeConfig(method=method, **speculation), stated, keys)


def plan(engine: str, method: str | None = "eagle3", **stated: Any) -> Launch:
    return ENGINES[engine](wanted(method, **stated))


def test_vllm_as_the_document_starts_it() -> None:
    launch = plan("vllm", max_draft_len=2, max_seq_len=4096, port=9000)
    assert shlex.join(launch.words) == (
        "vllm serve org/target --max-model-len 4096 --speculative-config "
        """'{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 2}' --host 127.0.0.1 --port 9000"""
    )
    assert launch.worker == ("python", "-m", "dynamo.vllm", "--model", "org/target")


def test_sglang_as_dynamo_starts_it() -> None:
    launch = plan("sglang", max_draft_len=3, tensor_parallel_size=2)
    assert shlex.join(launch.words) == (
        "python -m sglang.launch_server --model-path org/target --tp-size 2 --enable-metrics "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/head --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --host 127.0.0.1 --port 8000"
    )
    assert launch.gpus == 2


def test_trtllm_as_the_playbook_starts_it() -> None:
    launch = plan("trtllm", "draft_target", max_batch_size=1, kv_cache_free_memory_fraction=0.9,
                  kv_cache_enable_block_reuse=False)  # fmt: skip
    assert shlex.join(launch.words) == (
        "trtllm-serve org/target --backend pytorch --extra_llm_api_options trtllm.yml --host 127.0.0.1 --port 8000 "
        "--served_model_name org/target"
    )
    assert launch.files == {
        "trtllm.yml": """max_batch_size: 1
disable_overlap_scheduler: true
speculative_config:
  decoding_type: DraftTarget
  max_draft_len: 4
  speculative_model_dir: org/head
kv_cache_config:
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.9
return_perf_metrics: true
"""
    }


def test_ours_takes_everything_as_it_was_said() -> None:
    launch = plan("sametoken", "eagle3", tree_top_k=3, max_total_draft_tokens=9, draft_len_schedule={4: 4, 16: 2},
                  adaptive=False, served_model_name=("a", "b"), device="cpu")  # fmt: skip
    assert shlex.join(launch.words) == (
        "sametoken serve org/target --draft org/head --method eagle3 --tree-top-k 3 --max-total-draft-tokens 9 "
        "--draft-len-schedule 4:4,16:2 --no-adaptive --served-model-name a --served-model-name b --device cpu "
        "--host 127.0.0.1 --port 8000"
    )
    assert launch.gpus == 0
    assert launch.image == "sametoken:cpu"
    asked, unsaid = plan("sametoken", "eagle3", device="cuda"), plan("sametoken", "eagle3")
    assert (asked.image, asked.gpus, unsaid.image, unsaid.gpus) == ("sametoken:cuda", 1, "sametoken:cpu", 0)


# Values that differ from every default, so that each option shows in a command.
STATED: dict[str, Any] = {
    "revision": "v1", "tokenizer": "org/tokenizer", "dtype": "bfloat16", "max_batch_size": 8, "max_num_tokens": 2048,
    "max_seq_len": 4096, "tensor_parallel_size": 2, "kv_cache_tokens_per_block": 16,
    "kv_cache_enable_block_reuse": False, "kv_cache_dtype": "fp8", "cuda_graphs": False, "host": "0.0.0.0",
    "port": 9000, "served_model_name": ("name",), "adaptive": False, "max_draft_len": 5,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_len_schedule": {4: 5}},
    "draft_target": {},
    "ngram": {"max_matching_ngram_size": 4},
    "suffix": {},
    "eagle": {},
    "medusa": {},
}
OF_ENGINE = {
    "vllm": ("eagle3", "draft_target", "ngram", "suffix", "eagle", "medusa"),
    "sglang": ("eagle3", "draft_target", "eagle"),
    "trtllm": ("eagle3", "draft_target", "ngram"),
}


def flags(launch: Launch) -> dict[str, str]:
    """Options and the words after them."""
    found: dict[str, list[str]] = {}
    for word in launch.words:
        if word.startswith("--"):
            found[name := word.removeprefix("--")] = []
        elif found:
            found[name].append(word)
    return {name: " ".join(words) for name, words in found.items()}


@pytest.mark.parametrize("method", OF_ENGINE["vllm"])
def test_vllm_knows_every_word(method: str) -> None:
    said = flags(plan("vllm", method, **STATED, **METHODS[method]))
    assert said.keys() <= VLLM_FLAGS
    drafts = json.loads(said["speculative-config"])
    assert drafts.keys() <= VLLM_KEYS
    assert drafts["method"] in VLLM_METHODS
    assert drafts["num_speculative_tokens"] == 5
    assert said["kv-cache-dtype"] == "fp8_per_token_head"
    assert "no-enable-prefix-caching" in said
    assert "enforce-eager" in said


@pytest.mark.parametrize("method", OF_ENGINE["sglang"])
def test_sglang_knows_every_word(method: str) -> None:
    said = flags(plan("sglang", method, **STATED))
    assert said.keys() <= SGLANG_FLAGS
    assert said["speculative-algorithm"] in SGLANG_ALGORITHMS
    assert (said["speculative-num-steps"], said["speculative-num-draft-tokens"]) == ("5", "6")
    assert "disable-radix-cache" in said
    assert "disable-decode-cuda-graph" in said


@pytest.mark.parametrize("method", OF_ENGINE["trtllm"])
def test_trtllm_knows_every_word(method: str) -> None:
    launch = plan("trtllm", method, **STATED, **METHODS[method])
    assert flags(launch).keys() <= TRTLLM_FLAGS
    config = yaml.safe_load(launch.files["trtllm.yml"])
    assert config.keys() <= TRTLLM_KEYS
    assert config["kv_cache_config"].keys() <= TRTLLM_CACHE_KEYS
    drafts = config["speculative_config"]
    assert drafts.keys() <= TRTLLM_SPECULATIVE[drafts["decoding_type"]]
    assert config["cuda_graph_config"] is None


def test_trees_where_the_engine_has_them() -> None:
    said = flags(plan("sglang", tree_top_k=2, max_draft_len=3, max_total_draft_tokens=5))
    assert (said["speculative-num-steps"], said["speculative-eagle-topk"]) == ("3", "2")
    assert said["speculative-num-draft-tokens"] == "6"
    said = yaml.safe_load(plan("trtllm", tree_top_k=2, max_draft_len=3).files["trtllm.yml"])["speculative_config"]
    assert said == {
        "decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": HEAD, "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 6,
    }  # fmt: skip


def test_a_schedule_in_each_engine_s_words() -> None:
    said = json.loads(flags(plan("vllm", max_draft_len=3, draft_len_schedule=SCHEDULE))["speculative-config"])
    assert said["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 8, 2], [9, 65536, 0]]
    assert ranges({1: 2}) == [[1, 1, 2], [2, 65536, 0]]
    launch = plan("trtllm", max_draft_len=3, draft_len_schedule=SCHEDULE)
    assert yaml.safe_load(launch.files["trtllm.yml"])["speculative_config"]["draft_len_schedule"] == SCHEDULE
    assert launch.notes == ("TensorRT-LLM before 1.4 reads the sizes of draft_len_schedule as the smallest of a range",)
    said = json.loads(flags(plan("vllm", max_concurrency=4))["speculative-config"])
    assert said["num_speculative_tokens_per_batch_size"] == [[1, 4, 4], [5, 65536, 0]]


@pytest.mark.parametrize(("engine", "method", "stated", "words"), [
    ("vllm", "eagle3", {"tree_top_k": 2}, "--tree-top-k 2: vLLM cannot draft trees: it verifies chains only; set"),
    ("vllm", "eagle3", {"max_prefill_share": 0.5}, "vLLM has no option for --max-prefill-share: it has no such"),
    ("vllm", "eagle3", {"adaptive": True}, "vLLM has no option for --adaptive: its drafts have one length; set --no"),
    ("vllm", "eagle3", {"kv_cache_free_memory_fraction": 0.5}, "--engine-args '--gpu-memory-utilization 0.8'"),
    ("sglang", "medusa", {}, "--method medusa: SGLang has no such drafts; expected one of draft_target, eagle"),
    ("sglang", "suffix", {}, "--method suffix: SGLang has no such drafts"),
    ("sglang", "eagle3", {"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: SGLang has no such type; expected auto"),
    ("sglang", "eagle3", {"api_key": ("k",)}, "SGLang has no option for --api-key: its key would stand on the comma"),
    ("sglang", "eagle3", {"draft_len_schedule": {4: 4}}, "SGLang has no option for --draft-len-schedule: it chooses"),
    ("sglang", "eagle3", {"served_model_name": ("a", "b")}, "SGLang serves a model under one name; give one"),
    ("trtllm", "medusa", {}, "--method medusa: TensorRT-LLM has no such drafts; expected one of draft_target, ea"),
    ("trtllm", "eagle", {}, "--method eagle: TensorRT-LLM has no such drafts; expected one of draft_target, eag"),
    ("trtllm", "draft_target", {"tree_top_k": 2}, "TensorRT-LLM has no option for --tree-top-k: it verifies chains"),
    ("trtllm", "eagle3", {"data_parallel_size": 2}, "start one server for each replica"),
    ("trtllm", "eagle3", {"draft_revision": "v2"}, "download the draft and give its directory"),
    ("trtllm", None, {"api_key": ("k",)}, "its server has no keys; put a proxy before it"),
])  # fmt: skip
def test_what_an_engine_cannot_be_told_is_refused(
    engine: str, method: str | None, stated: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(engine, method, **stated)
    assert words in str(refused.value)


def test_an_option_at_its_default_is_no_difference() -> None:
    assert plan("vllm", max_prefill_share=OPTIONS["max_prefill_share"].field.default).words == plan("vllm").words


@pytest.mark.parametrize("engine", OF_ENGINE)
def test_no_draft_is_a_plain_server(engine: str) -> None:
    launch = plan(engine, None)
    assert not any("speculative" in word for word in (*launch.words, *launch.files.values()))


class TestCommand:
    """`sametoken deploy plan` with the embedded pair, whose head is in our own layout."""

    def test_it_prints_the_command_and_writes_the_head(self, run: Any, tmp_path: Path) -> None:
        out = tmp_path / "head"
        answer = run("deploy", "plan", "embedded", "--draft", "embedded-eagle3", "--engine", "vllm", "--out", str(out),
                     "--gpu-memory-utilization", "0.7", "--engine-args", "--seed 1")  # fmt: skip
        assert answer.code == 0, answer.err
        assert answer.out == (
            f"vllm serve {embedded.TARGET} \\\n"
            "    --served-model-name embedded \\\n"
            "    --gpu-memory-utilization 0.7 \\\n"
            "    --seed 1 \\\n"
            f"""    --speculative-config '{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": 4}}' \\\n"""
            "    --host 127.0.0.1 \\\n"
            "    --port 8000\n"
        )
        assert answer.err == f"note: {out}: the head in vLLM's layout\n"
        again = run("deploy", "plan", "embedded", "--draft", str(out), "--engine", "vllm")
        assert again.code == 0
        assert f'"model": "{out}"' in again.out

    def test_words_that_no_shell_reads_are_refused(self, run: Any) -> None:
        answer = run("deploy", "plan", MODEL, "--engine", "vllm", "--engine-args", "--seed '1")
        assert answer.code == 2
        assert """--engine-args "--seed '1": No closing quotation; expected words as a shell has""" in answer.err

    def test_a_head_in_another_layout_needs_a_place(self, run: Any) -> None:
        answer = run("deploy", "plan", "--engine", "trtllm")
        assert answer.code == 2
        assert "is not in a layout of TensorRT-LLM (tensor layers.0.hidden_norm.weight); give --out DIR" in (answer.err)

    def test_a_hub_id_is_planned_without_a_download(self, run: Any) -> None:
        answer = run("deploy", "plan", MODEL, "--engine", "sglang", "--method", "eagle3", "--draft", HEAD)
        assert answer.code == 0
        assert "--speculative-draft-model-path org/head" in answer.out
        assert answer.err == "note: org/head was not read; --out DIR downloads it and checks its layout\n"

    def test_another_engine_s_words_are_translated(self, run: Any) -> None:
        answer = run("deploy", "plan", MODEL, "--engine", "trtllm", "--speculative-config",
                     json.dumps({"method": "eagle3", "model": HEAD, "num_speculative_tokens": 2}))  # fmt: skip
        assert answer.code == 0
        assert "decoding_type: Eagle\n  max_draft_len: 2\n  speculative_model_dir: org/head" in answer.out

    @pytest.mark.parametrize(("words", "message"), [
        (("--engine", "llama"), "unknown engine 'llama'"),
        (("--target", "nomad"), "unknown target 'nomad'"),
        (("--image", "mine"), "--image is for --target compose and kubernetes, and --engine trtllm"),
        (("--target", "compose", "--image", "a b"), "--image 'a b': expected a name such as registry/name:tag"),
        (("--target", "kubernetes", "--port", "0"), "--port 0 is any free port"),
        (("--out", "x"), "--out is for a head that another engine reads"),
        (("--engine", "vllm", "--method", "auto"), "--method auto: only sametoken mixes drafters"),
        (("--engine", "vllm", "--method", "none", "--max-draft-len", "2"), "--max-draft-len is for drafts"),
        (("--engine", "vllm", "--draft", str(embedded.HEAD), "--method", "eagle"), "is a draft for --method eagle3"),
        (("--engine", "vllm", "--method", "ngram", "--out", "x"), "--out is for a head"),
    ])  # fmt: skip
    def test_bad_words_are_refused(self, run: Any, words: tuple[str, ...], message: str) -> None:
        answer = run("deploy", "plan", "embedded", *words)
        assert answer.code == 2
        assert message in answer.err

    def test_a_method_without_its_draft_is_refused(self, run: Any) -> None:
        answer = run("deploy", "plan", MODEL, "--engine", "vllm", "--method", "eagle3")
        assert answer.code == 2
        assert "--method eagle3 needs a draft" in answer.err

    def test_what_dynamo_s_frontend_takes_over_is_named(self, run: Any) -> None:
        answer = run(
            "deploy", "plan", MODEL, "--target", "dynamo", "--api-key", "k", "--ssl-certfile", "x", "--host", "::"
        )
        assert answer.out.splitlines()[4:6] == [
            "python -m dynamo.frontend --http-host=:: --http-port=8000 &",
            "DYN_SYSTEM_PORT=8081 python -m sametoken.deploy.dynamo \\",
        ]
        assert answer.err == (
            f"note: {INFRASTRUCTURE}\n"
            "note: --ssl-certfile: left out, since Dynamo's frontend is the server\n"
            "note: Dynamo's frontend requires no API key; put a proxy before it\n"
        )

    def test_keys_are_not_printed(self, run: Any) -> None:
        answer = run("deploy", "plan", MODEL, "--engine", "vllm", "--api-key", "sk-1")
        assert answer.code == 0
        assert "sk-1" not in answer.out + answer.err
        assert answer.out.startswith("# Set VLLM_API_KEY to the API key first.\n")
