"""Command lines from model cards, guides and issues of llama.cpp and vLLM: what becomes of each when it is pasted."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from sametoken import cli
from sametoken.commands import doors, serve
from sametoken.commands.options import Chosen
from sametoken.commands.resolution import resolve

# Lines that are served, with the settings of ours that they must have: "" for the defaults.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("llama-server -hf ggml-org/gemma-3-1b-it-GGUF", {"port": 8080}),
    ("llama serve -hf unsloth/Qwen3.8-27B-GGUF:UD-Q4_K_M", {"port": 8080}),
    ("llama-server -hf ggml-org/gpt-oss-20b-GGUF -c 0 -fa --jinja --reasoning-format none", {"max_seq_len": None}),
    ("llama-server -hf ggml-org/gpt-oss-120b-GGUF --ctx-size 32768 --jinja -ub 4096 -b 4096 --n-cpu-moe 36 "
     """--chat-template-kwargs '{"reasoning_effort": "high"}'""",
     {"max_num_tokens": 4096, "default_template_options": {"reasoning_effort": "high", "enable_thinking": True}}),
    ("llama-server -hf Qwen/Qwen3-8B-GGUF:Q8_0 --jinja --reasoning-format deepseek -ngl 99 -fa -sm row --temp 0.6 "
     "--top-k 20 --top-p 0.95 --min-p 0 -c 40960 -n 32768 --no-context-shift",
     {"max_seq_len": 40960, "cap_max_seq_len": True}),
    ("llama-server -m m.gguf -c 131072 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768",
     {"rope_scaling": YARN, "max_seq_len": 131072}),
    ("llama-server --model m.gguf --threads 32 --ctx-size 16384 --n-gpu-layers 99 -ot '.ffn_(up|down)_exps.=CPU' "
     "--seed 3407 --prio 3 --min-p 0.01 --cache-type-k q4_0", {"threads": 32, "kv_cache_dtype": "auto"}),
    ("llama-server -hf unsloth/GLM-4.5-Air-GGUF:Q4_K_XL --jinja -fa -ngl 99 -c 65536 --no-mmap --host 0.0.0.0 "
     "--alias glm", {"served_model_name": ("glm",), "host": "0.0.0.0"}),
    ("llama-server -m m.gguf -md d.gguf --draft 16", {"draft": "d.gguf", "max_draft_len": 16}),
    ("llama-server -m m.gguf -md d.gguf -fa -ngl 99 -ngld 99 -c 32000 -cd 32000 --device CUDA0 --device-draft CUDA1 "
     "--tensor-split 3,1 --samplers 'temperature;top_k;top_p' --temp 0.1 --draft-max 16 --draft-min 4",
     {"draft": "d.gguf", "max_draft_len": 16}),
    ("llama-server -m m.gguf -md d.gguf --spec-type draft-simple,ngram-mod --spec-draft-n-max 8 --spec-draft-n-min 2 "
     "--spec-draft-p-min 0.8 --spec-draft-ngl 99", {"method": "auto"}),
    ("llama-server -m m.gguf --spec-type ngram-simple --draft-max 64", {"method": "ngram", "max_draft_len": 64}),
    ("llama-server -m m.gguf --spec-type draft-mtp --spec-draft-n-max 2", {"method": "mtp", "max_draft_len": 2}),
    ("llama-server -m m.gguf -md d.gguf --spec-type draft-dflash", {"method": None, "draft": None}),
    ("llama-server -m m.gguf --spec-type draft-mtp,ngram-simple", {"method": "mtp"}),
    ("llama-server -hf ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF --port 8012 -ngl 99 -fa on -ub 1024 -b 1024 --ctx-size 0 "
     "--cache-reuse 256 -dt 0.1", {"port": 8012, "max_num_tokens": 1024}),
    ("llama-server -m m.gguf --mmproj mmproj.gguf --image-min-tokens 1024 --media-path .", {}),
    ("llama-server -m m.gguf --cpu-moe --n-gpu-layers 0 --mlock --threads 4 --batch-size 256 --ctx-size 16384 "
     "--cache-type-k q4_0 --cache-type-v q4_0 --api-prefix /v1", {"kv_cache_dtype": "int8", "root_path": "/v1"}),
    ("llama-server -m m.gguf --samplers 'top_k;tfs_z;typical_p;top_p;min_p;temperature' --chat-template llama3", {}),
    ("llama-server -m m.gguf -r 'User:' -r '###' --ignore-eos --temp 0 -s 42 --numa distribute", {}),
    ("llama-server -m m.gguf --threads -1 --fit on --prio 3 --temp 1.0 --top-p 0.95 --ctx-size 16384 --jinja", {}),
    ("llama-server --model=m.gguf --port=8081 --ctx-size=4096", {"port": 8081, "max_seq_len": 4096}),
    ("vllm serve m --max-model-len 131072 --hf-overrides '{\"rope_parameters\": {\"factor\": 4.0, "
     "\"original_max_position_embeddings\": 32768, \"rope_theta\": 1000000, \"rope_type\": \"yarn\"}}'",
     {"rope_scaling": {**YARN, "rope_theta": 1000000}, "max_seq_len": 131072}),
    ("vllm serve m --rope-scaling '{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}' "
     "--max-model-len 131072", {"rope_scaling": YARN}),
    ("vllm serve Qwen/Qwen3-8B --enable-reasoning --reasoning-parser deepseek_r1", {"reasoning_parser": "deepseek_r1"}),
    ("vllm serve zai-org/GLM-4.7-FP8 --tensor-parallel-size 4 --speculative-config.method mtp "
     "--speculative-config.num_speculative_tokens 1 --tool-call-parser glm47 --reasoning-parser glm45 "
     "--enable-auto-tool-choice --served-model-name glm-4.7-fp8", {"method": "mtp", "tensor_parallel_size": 4}),
    ("vllm serve m --tp 8 --trust-remote-code --speculative-config '{\"method\": \"mtp\", "
     "\"num_speculative_tokens\": 3}'", {"tensor_parallel_size": 8, "method": "mtp", "max_draft_len": 3}),
    ("vllm serve m --speculative-config '{\"method\": \"dflash\", \"model\": \"z-lab/Qwen3-8B-DFlash\", "
     "\"num_speculative_tokens\": 15}'", {"draft": None}),
    ("vllm serve openai/gpt-oss-120b --kv-cache-dtype fp8 --max-num-batched-tokens 8192 --compilation-config "
     "'{\"pass_config\":{\"fuse_allreduce_rms\":true},\"cudagraph_mode\":\"FULL_DECODE_ONLY\"}' --stream-interval 20 "
     "--no-enable-prefix-caching", {"kv_cache_dtype": "fp8", "kv_cache_enable_block_reuse": False}),
    ("vllm serve m --kv-cache-dtype fp8_e5m2", {"kv_cache_dtype": "fp8"}),
    ("vllm serve meta-llama/Llama-3.3-70B-Instruct --speculative-config '{\"model\": "
     "\"yuhuili/EAGLE3-LLaMA3.3-Instruct-70B\", \"method\": \"eagle3\", \"num_speculative_tokens\": 3}'",
     {"method": "eagle3", "max_draft_len": 3}),
    ("vllm serve m --speculative-model '[ngram]' --num-speculative-tokens 5 --ngram-prompt-lookup-max 4 "
     "--use-v2-block-manager", {"method": "ngram", "max_draft_len": 5}),
    ("vllm serve mistralai/Mistral-Small-3.2-24B-Instruct-2506 --tokenizer_mode mistral --config_format mistral "
     "--load_format mistral --tool-call-parser mistral --enable-auto-tool-choice --limit_mm_per_prompt "
     "'{\"image\":10}' --tensor-parallel-size 2", {"tensor_parallel_size": 2}),
    ("vllm serve m --quantization awq --max-num-seqs 64 --gpu-memory-utilization 0.95 --swap-space 16 "
     "--disable-log-requests --enable-chunked-prefill --max-num-batched-tokens 2048", {"max_batch_size": 64}),
    ("vllm serve m --max-num-seq=128 --max_model_len=20480 --block-size=64 --dtype=bfloat16 --tensor-parallel-size=1",
     {"max_batch_size": 128, "max_seq_len": 20480, "kv_cache_tokens_per_block": 64}),
    ("vllm serve --model m --served-model-name a b --disable-log-stats -O3 --data-parallel-size 2 -pp 1",
     {"served_model_name": ("a", "b"), "data_parallel_size": 2}),
    ("vllm serve Qwen/Qwen3-VL-235B-A22B-Instruct --hf-overrides '{\"rope_parameters\": {\"rope_type\":\"yarn\","
     "\"factor\":3.0,\"original_max_position_embeddings\":262144,\"mrope_section\":[24,20,20],"
     "\"mrope_interleaved\":true}}' --max-model-len 1000000 --async-scheduling --mm-encoder-tp-mode data "
     "--limit-mm-per-prompt.video 0", {"max_seq_len": 1000000}),
]  # fmt: skip
# Lines that are refused, with what is said.
REFUSED = [
    ("llama-server -m m.gguf --reranking", "rankings and pooled embeddings"),
    ("llama-server -m m.gguf --grammar-file grammars/json.gbnf", "requests set it"),
    ("llama-server -m m.gguf --lora a.gguf", "merge them into the weights"),
    ("llama-server -m m.gguf --mirostat 2", "this sampler is not implemented"),
    ("llama-server --models-dir ./models --models-max 2", "a server has one model"),
    ("llama-server -m m.gguf --yarn-attn-factor 0.7", "state attention_factor"),
    ("vllm serve Qwen/Qwen3-Reranker-0.6B --hf_overrides '{\"architectures\": [\"Qwen3ForSequenceClassification\"],"
     "\"classifier_from_token\": [\"no\", \"yes\"],\"is_original_qwen3_reranker\": true}'", "leave architectures out"),
    ("vllm serve m --hf-overrides '{\"dual_chunk_attention_config\":{}}'", "leave dual_chunk_attention_config out"),
    ("vllm serve m --quantization bitsandbytes --load-format bitsandbytes", "to round weights as they are loaded"),
    ("vllm serve m --enable-lora --lora-modules sql-lora=/tmp/x", "merge them into the weights"),
    ("vllm serve m --pipeline-parallel-size 2", "set --tensor-parallel-size instead"),
    ("vllm serve m --tool-parser-plugin x/parser.py", "Python modules from elsewhere"),
    ("vllm serve m --speculative-config '{\"method\": \"custom_class\"}'", "implement sametoken.drafters"),
]  # fmt: skip


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of the last command of `sametoken serve`, which loads nothing."""
    found: dict[str, Any] = {}

    def command(model: str | None, values: Chosen) -> int:
        resolution = resolve(model, values)
        serve.resolved(model, resolution, serve.server_config(resolution.values))
        found.update(resolution.values, notes=[*doors.notes_of_start(), *resolution.notes])
        return 0

    monkeypatch.setattr(serve, "command", command)
    return found


@pytest.mark.parametrize(("line", "settings"), SERVED, ids=[line[:60] for line, _ in SERVED])
def test_a_line_is_served(line: str, settings: dict[str, Any], resolved: dict[str, Any]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    assert not ended.value.code
    values = {name: tuple(each) if isinstance(each, list) else each for name, each in resolved.items()}
    assert {name: values[name] for name in settings} == settings


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_a_line_is_refused(line: str, said: str, resolved: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        ("llama-server -m m --spec-type draft-dflash", "--spec-type draft-dflash (block diffusion"),
        ("llama-server -m m -md d --spec-type draft-dspark", "--draft d"),
        ("llama-server -m m -ctk q4_0 -ctv q4_0", "-ctk q4_0 (kept in 8 bits, as q8_0)"),
        ("llama-server -m m --mmproj p.gguf", "--mmproj p.gguf"),
        ("vllm serve m --kv-cache-dtype turboquant_4bit_nc", "(kept as fp8, E4M3"),
        ('vllm serve m --speculative-config \'{"method": "pard"}\'', "(parallel drafts"),
    ],
)
def test_what_has_no_part_here_is_noted(line: str, noted: str, resolved: dict[str, Any]) -> None:
    with pytest.raises(SystemExit):
        cli.main(shlex.split(line))
    (note,) = resolved["notes"]
    assert note.startswith("no effect here: ")
    assert noted in note
