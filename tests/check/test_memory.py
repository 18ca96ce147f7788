"""Forecast of memory by `sametoken doctor MODEL`, against the memory of loaded models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models_page import renewed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig

import big_models
import tiny_models
from cli_checks import speak
from quantised_makers import MADE, quantised
from sametoken import LLM, embedded
from sametoken.check.memory import EngineSettings, forecast
from sametoken.checkpoint.hub import resolve
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.planned import held_bytes, planned_bytes
from sametoken.errors import CheckpointError, ConfigError
from sametoken.kernels.cpu.variant import library
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.ranks import RankPart

WHOLE = RankPart()
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 2}
FORMATS = ("fp8", "fp8-blocks", "nvfp4", "nvfp4-compressed", "mxfp4", "awq", "gptq", "gptq-64-order", "w4a16", "w8a8",
           "w8a16-zeros")  # fmt: skip
EXACT = 0.03  # what the prediction may be off


def saved(config: Any, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved(LlamaConfig(**SIZES), tmp_path_factory.mktemp("plain") / "model")
    speak(folder)
    return folder


def real_bytes(decoder: Any) -> int:
    """Bytes of a loaded decoder with its rotary tables."""
    for rope in decoder.config.ropes:
        if rope is not None:
            decoder.rope_tables(torch.device("cpu"), rope)
    return held_bytes(decoder)


def check(
    directory: Path, dtype: torch.dtype = torch.bfloat16, quantization: str = "none", part: RankPart = WHOLE
) -> None:
    """The planned bytes are those of the loaded model, or of a rank's part."""
    decoder = load_decoder(directory, dtype, "cpu", quantization=quantization, part=part)
    planned = planned_bytes(directory, dtype, quantization=quantization, part=part)
    assert planned == pytest.approx(real_bytes(decoder), rel=EXACT)


def only_index(directory: Path) -> None:
    """Replace the weights of a directory by an index."""
    weights = directory / "model.safetensors"
    stored = load_file(weights)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
        "weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors"),
    }
    weights.unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_plain_weights(plain: Path, quantization: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr("sametoken.model.linear.library", lambda: None)
    check(plain, quantization=quantization)


def test_float32_with_tied_token_vectors(tmp_path: Path) -> None:
    check(saved(LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path / "tied"), torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_other_tools(plain: Path, name: str, tmp_path: Path) -> None:
    check(quantised(plain, name, tmp_path / name))


@pytest.mark.parametrize(
    "family",
    ["gemma-3", "gemma-3-images", "glm-4", "glm-4.5-moe", "deepseek-v3", "llama-4", "olmo-3", "qwen-3-vl", "smollm-3"],
)
def test_families(family: str, tmp_path: Path) -> None:
    """Layers with rotations of their own, fused projections, and files that hold a part that reads images."""
    tiny_models.save(family, tmp_path / family)
    check(tmp_path / family, torch.float32)


def test_experts(tmp_path: Path) -> None:
    """Blocks with and without experts, plain and in a format of another tool."""
    directory = saved(Qwen3MoeConfig(**SIZES, **EXPERTS), tmp_path / "moe")
    check(directory)
    check(directory, quantization="int4")
    check(quantised(directory, "nvfp4", tmp_path / "nvfp4"))


def packed_experts(source: Path, target: Path) -> Path:
    """A copy of a gpt-oss with its experts in MXFP4."""
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made = [MADE["mxfp4"].make(each.t().float().contiguous())[0] for each in tensor]
            stored[f"{name}_blocks"] = torch.stack([parts["weight_packed"].unflatten(1, (-1, 16)) for parts in made])
            stored[f"{name}_scales"] = torch.stack([parts["weight_scale"] for parts in made])
        else:
            stored[name] = tensor
    shutil.copytree(source, target)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return target


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    check(packed_experts(saved(config, tmp_path / "plain"), tmp_path / "packed"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_K"])
def test_gguf(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of a file's tensors is not read."""
    gguf = pytest.importorskip("gguf")
    from gguf_makers import write_gguf
    from sametoken.checkpoint.gguf.container import Container

    monkeypatch.setattr("sametoken.checkpoint.hub.opened_directory", lambda: tmp_path / "opened")
    torch.manual_seed(0)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32)
        types = gguf.GGMLQuantizationType
        write_gguf(tmp_path / "m.gguf", model, lambda name: types.Q8_0 if "embd" in name else getattr(types, kind))
    directory = resolve(tmp_path / "m.gguf")
    real = real_bytes(load_decoder(directory, torch.bfloat16, "cpu"))
    monkeypatch.setattr(Container, "__init__", refuse_data(Container))
    assert planned_bytes(directory, torch.bfloat16) == pytest.approx(real, rel=EXACT)


def refuse_data(kind: type) -> Any:
    """`__init__` of a GGUF container whose data must not be read."""
    made = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        object.__setattr__(self, "data", False)

    return init


def test_weights_need_not_be_there(plain: Path, tmp_path: Path) -> None:
    """A plain model follows from config.json, and a quantised one from the headers of its files."""
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(plain / "config.json", config)
    assert planned_bytes(config, torch.bfloat16) == planned_bytes(plain, torch.bfloat16)
    cut = quantised(plain, "nvfp4", tmp_path / "cut")
    whole, data = planned_bytes(cut, torch.bfloat16), (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    assert planned_bytes(cut, torch.bfloat16) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_an_index_of_quantised_weights(plain: Path, name: str, tmp_path: Path) -> None:
    directory = quantised(plain, name, tmp_path / name)
    whole = planned_bytes(directory, torch.bfloat16)
    only_index(directory)
    assert planned_bytes(directory, torch.bfloat16) == pytest.approx(whole, rel=EXACT)


def test_an_index_without_a_size_is_refused(plain: Path, tmp_path: Path) -> None:
    directory = quantised(plain, "fp8", tmp_path / "fp8")
    only_index(directory)
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": json.loads(file.read_text())["weight_map"]}))
    with pytest.raises(CheckpointError, match="states no total_size; download the weights"):
        planned_bytes(directory, torch.bfloat16)


def settings(batch: int, context: int, **speculative: Any) -> EngineSettings:
    engine = EngineConfig(max_batch_size=batch, max_seq_len=context, device="cpu", max_num_tokens=64)
    return EngineSettings(engine, KVCacheConfig(), SpeculativeConfig(**speculative))


@pytest.mark.parametrize(
    ("draft", "window"), [(None, 512), (embedded.NAME, 512), (embedded.NAME, 8), (embedded.HEAD_NAME, 8)]
)
def test_weights_and_pool_are_the_engines(draft: str | None, window: int) -> None:
    drafting = {"tree_top_k": 2, "draft_window": window}
    llm = LLM("embedded", draft, max_batch_size=3, max_seq_len=200, speculative=drafting)
    place = None if draft is None else Path(embedded.draft(draft))
    found = forecast(Path(embedded.target("embedded")), place, settings(3, 200, **drafting), memory=2**33)
    modules: list[Any] = [llm.engine.runner.decoder]
    caches = [llm.engine.runner.cache]
    if draft is not None:
        guesser = llm.engine.drafting.drafters[llm.method].guesser
        caches.append(guesser.cache)
        modules.append(guesser.decoder if draft == embedded.NAME else guesser.head)
    real = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) + caches[0].table.table.nbytes
    assert sum(part.cache for part in found.parts) == real
    for module in modules:
        module.rope_tables(torch.device("cpu"))
    assert [part.weights for part in found.parts] == pytest.approx([held_bytes(m) for m in modules], rel=EXACT)
    shortened = draft == embedded.NAME and window == 8
    assert found.parts[-1].window == 8 * shortened
    assert ("  draft window   the last 8 tokens" in found.lines()) == shortened
    assert found.fits
    assert not found.remedies


@pytest.mark.parametrize("name", ["plain", "int8", "w4a16", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_narrowed_draft(name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of its tokens are a copy beside the whole head."""
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": tied})
    directory = saved(config, tmp_path / "plain")
    if name == "w4a16":
        directory = quantised(directory, name, tmp_path / name)
    if name == "gguf":
        gguf = pytest.importorskip("gguf")
        from gguf_makers import write_gguf

        monkeypatch.setattr("sametoken.checkpoint.hub.opened_directory", lambda: tmp_path / "opened")
        model = AutoModelForCausalLM.from_config(config)
        write_gguf(tmp_path / "m.gguf", model, lambda name: gguf.GGMLQuantizationType.Q8_0)
        directory = resolve(tmp_path / "m.gguf")
    quantization = "int8" if name == "int8" else "none"
    decoder = load_decoder(directory, torch.bfloat16, "cpu", quantization=quantization)
    whole, real = real_bytes(decoder), real_bytes(decoder.narrowed(torch.arange(100)))
    assert planned_bytes(directory, torch.bfloat16, None, quantization, outputs=100) == pytest.approx(real, rel=EXACT)
    head = (real - whole - 100 * 8) / (112 * 256)  # without the ids; whole tiles of 16 rows
    assert head == pytest.approx({"int8": 1.016, "gguf": 1.065}.get(name, 2), rel=0.01)


def test_a_narrowed_draft_in_words(run: Any) -> None:
    answer = run("doctor", "embedded", "--draft", "embedded", "--draft-vocab-size", "1000", "--memory", "8GiB")
    assert answer.code == 0
    assert "  vocabulary     1000 tokens, whose rows are held twice" in answer.out
    answer = run("doctor", "embedded", "--draft", "embedded-eagle3", "--draft-vocab-size", "1000")
    assert answer.code == 2
    assert "draft_vocab_size 1000: " in answer.err
    assert "is a head, whose vocabulary was chosen when it was trained; leave it out" in answer.err


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_ranks_part(plain: Path, quantization: str) -> None:
    """Both ranks hold as much, and more than half, since token vectors are not cut, nor a head that a draft reads."""
    for rank in range(2):
        check(plain, quantization=quantization, part=RankPart(rank, 2))
    whole, part, with_head = (
        planned_bytes(plain, torch.bfloat16, None, quantization, each)
        for each in (WHOLE, RankPart(0, 2), RankPart(0, 2, whole_head=True))
    )
    head = 2 * (with_head - part)
    assert 0.99 < head / (256 * 256 * {"none": 2, "int8": 1, "int4": 0.5}[quantization]) < 1.2
    assert part > whole / 2


@pytest.mark.parametrize("name", ["nvfp4", "fp8-blocks", "awq", "w4a16"])
def test_a_ranks_part_of_quantised_weights_and_of_an_index(name: str, tmp_path: Path) -> None:
    tiny_models.build("llama-3", hidden_size=256, intermediate_size=256).save_pretrained(tmp_path / "plain")
    directory = quantised(tmp_path / "plain", name, tmp_path / name)
    check(directory, part=RankPart(1, 2))
    part = planned_bytes(directory, torch.bfloat16, part=RankPart(1, 2))
    only_index(directory)
    assert planned_bytes(directory, torch.bfloat16, part=RankPart(1, 2)) == pytest.approx(part, rel=EXACT)


def test_a_ranks_part_of_experts(tmp_path: Path) -> None:
    check(saved(Qwen3MoeConfig(**SIZES, **EXPERTS), tmp_path / "moe"), part=RankPart(1, 2))


@pytest.mark.parametrize(
    ("draft", "ranks"), [(None, 1), (embedded.HEAD_NAME, 1), (str(embedded.target(embedded.NAME)), 2)]
)
def test_memory_of_the_first_rank(draft: str | None, ranks: int) -> None:
    """Its part of the target and of a divided draft, a whole head, and their caches."""
    drafting = SpeculativeConfig(draft_tensor_parallel_size=ranks)
    llm = LLM("embedded", draft, drafting, max_batch_size=3, max_seq_len=200, tensor_parallel_size=2)
    place, target = None if draft is None else Path(embedded.draft(draft)), Path(embedded.target("embedded"))
    asked = settings(3, 200)
    asked = asked._replace(engine=asked.engine.model_copy(update={"tensor_parallel_size": 2}), speculative=drafting)
    found = forecast(target, place, asked, memory=2**33)
    modules: list[Any] = [llm.engine.runner.decoder]
    caches = [llm.engine.runner.cache]
    if draft is not None:
        guesser = llm.engine.drafting.drafters[llm.method].guesser
        caches.append(guesser.cache)
        modules.append(guesser.decoder if ranks > 1 else guesser.head)
    pool = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    for module in modules:
        module.rope_tables(torch.device("cpu"))
    weights = sum(held_bytes(module) for module in modules)
    assert found.total - found.activations == pytest.approx(pool + caches[0].table.table.nbytes + weights, rel=EXACT)
    assert "(cpu), the first of 2 ranks: fits" in found.lines()[-1]


def test_numbers_of_ranks_that_do_not_divide(plain: Path, run: Any) -> None:
    answer = run("doctor", str(plain), "--tp_size", "3", "--device", "cpu")
    assert answer.code == 2
    assert "tensor_parallel_size 3: the model has" in answer.err
    assert "use one of 1, 2" in answer.err


RESIDENT = """
import gc, sys, torch
from pathlib import Path
from sametoken.checkpoint.hub import resolve
from sametoken.checkpoint.load import load_decoder
from sametoken.kernels.cpu.memory import release

def anonymous():
    gc.collect()
    release()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

load_decoder(Path(sys.argv[2]), torch.bfloat16, "cpu").rope_tables(torch.device("cpu"))  # what stays of any load
before = anonymous()
decoder = load_decoder(Path(sys.argv[1]), torch.bfloat16, "cpu", quantization=sys.argv[3])
decoder.rope_tables(torch.device("cpu"))
print(anonymous() - before)
"""


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_resident_memory(quantization: str, tmp_path: Path) -> None:
    """A process of its own grows by what was said, of a model of 160 MB."""
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "vocab_size": 4096}
    directory = saved(LlamaConfig(**sizes), tmp_path / "model")
    small = str(embedded.target("embedded"))
    call = [sys.executable, "-c", RESIDENT, str(directory), small, quantization]
    # glibc keeps some megabytes of each thread that rounds weights for the next one, however large the model is.
    setting = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    grown = int(subprocess.run(call, capture_output=True, text=True, check=True, env=setting).stdout)
    assert grown == pytest.approx(planned_bytes(directory, torch.bfloat16, quantization=quantization), rel=EXACT)


def test_what_would_make_it_fit(plain: Path) -> None:
    """Every remedy is computed: with it the forecast says that it fits."""
    asked = settings(8, 256)
    whole = forecast(plain, None, asked, memory=2**40)
    tight = forecast(plain, None, asked, memory=whole.total - whole.parts[0].cache // 2)
    assert not tight.fits
    changes = {remedy.change.split()[0]: remedy for remedy in tight.remedies}
    assert {"--max-batch-size", "--max-seq-len", "--quantization", "2"} <= changes.keys()
    for option, field in (("--max-batch-size", "max_batch_size"), ("--max-seq-len", "max_seq_len")):
        value = int(changes[option].change.split()[1])
        assert 0 < value < getattr(asked.engine, field)
        changed = asked._replace(engine=asked.engine.model_copy(update={field: value}))
        assert forecast(plain, None, changed, memory=tight.memory).fits
        changed = asked._replace(engine=asked.engine.model_copy(update={field: value + 16}))
        assert not forecast(plain, None, changed, memory=tight.memory).fits
    ranks = next(each for each in tight.remedies if each.change.startswith("2 hosts"))
    cut = asked._replace(engine=asked.engine.model_copy(update={"tensor_parallel_size": 2}))
    assert forecast(plain, None, cut, memory=2**40).total == ranks.total
    int8 = asked._replace(engine=asked.engine.model_copy(update={"quantization": "int8"}))
    found = next(each for each in tight.remedies if each.change == "--quantization int8")
    assert forecast(plain, None, int8, memory=2**40).total == found.total
    hopeless = forecast(plain, None, asked, memory=2**20)
    assert len(hopeless.remedies) == 1
    assert hopeless.remedies[0].total > 2**20


def test_command(plain: Path, run: Any) -> None:
    options = ["--memory", "1GiB", "--max-num-seqs", "2", "--max-model-len", "128", "--device", "cpu"]
    found = json.loads(run("doctor", str(plain), *options, "--json").out)
    assert (found["batch"], found["context"], found["memory"]) == (2, 128, 2**30)
    (part,) = found["parts"]
    assert found["total"] == part["weights"] + part["cache"] + found["activations"]
    shown = run("doctor", str(plain), *options).out
    assert f"{part['token_bytes']:,} bytes a token" in shown
    assert "1.00 GiB (cpu): fits" in shown


def test_a_draft_of_another_vocabulary_is_named(run: Any, tiny_llm_dir: Path) -> None:
    words = "note             the draft has another vocabulary: token "
    assert words in run("doctor", "embedded", "--draft", str(tiny_llm_dir)).out
    (note,) = json.loads(run("doctor", "embedded", "--draft", str(tiny_llm_dir), "--json").out)["notes"]
    assert note in run("generate", "embedded", "--draft", str(tiny_llm_dir), "--prompt", "Once").err
    for draft in (embedded.NAME, embedded.HEAD_NAME):
        assert json.loads(run("doctor", "embedded", "--draft", draft, "--json").out)["notes"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("MODEL", "--memory", "much"), "--memory 'much': expected a size such as 50GB"),
        (("MODEL", "--num-prompts", "3"), "--num-prompts is for a head"),
        (("--memory", "3GiB"), "--memory is for a model: give MODEL too"),
        (("HEAD", "--target", "embedded", "--memory", "3GiB"), "--memory is for a model"),
        (("HEAD",), "--target is missing"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], words: str, plain: Path, run: Any) -> None:
    named = {"MODEL": str(plain), "HEAD": embedded.HEAD_NAME}
    assert words in run("doctor", *(named.get(each, each) for each in arguments)).err


def test_cuda_needs_a_device_or_its_memory(plain: Path) -> None:
    engine = EngineConfig(device="cuda", max_seq_len=256)
    asked = EngineSettings(engine, KVCacheConfig(), SpeculativeConfig())
    assert forecast(plain, None, asked, memory=2**33).device == "cuda"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="give --memory"):
            forecast(plain, None, asked)


@pytest.mark.skipif(library() is None, reason="the figures are those of the compiled kernels' layouts")
def test_the_page_of_big_models(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/big-models.md shows what the command prints; `make big-models` renews it."""
    page = (Path(__file__).parents[2] / "docs" / "big-models.md").read_text(encoding="utf-8")
    big_models.write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = []

    def told(words: list[str]) -> str:
        commands.append(words)
        return run(*words).out

    assert renewed(page, told) == page
    assert len(commands) == 6
