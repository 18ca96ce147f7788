"""What is said of the memory of a step with latent attention, against what torch's allocator gives out for it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DeepseekV3Config

from sametoken.check.memory import EngineSettings, forecast, step_bytes
from sametoken.checkpoint.load import load_decoder
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.runtime.kv_format import FORMATS
from sametoken.speculation.draft import ancestors

PAGE, VOCAB = 64, 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "kv_lora_rank": 64,
    "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module", params=[8, 20])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    config = DeepseekV3Config(**SIZES, num_attention_heads=request.param, num_key_value_heads=request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("form", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_peak_is_what_the_allocator_gives_out(directory: Path, dtype: torch.dtype, form: str) -> None:
    decoder = load_decoder(directory, dtype, "cpu")
    assert decoder.config.latent is not None
    # A prompt at once, the last piece of a long one, drafts of a few long sequences, and of many short ones.
    for rows, nodes, start in ((1, 512, 0), (1, 384, 1664), (3, 40, 2000), (8, 5, 507)):
        length = start + nodes
        pages = -(-(length + 512) // PAGE)
        table = PageTable(rows, rows * pages + 1, pages, PAGE, "cpu")
        for row in range(rows):
            table.extend(row, range(rows * pages - row, 0, -rows))
        cache = KVCache.of(decoder.config, table, dtype, "cpu", FORMATS[form])
        mask = ancestors(torch.arange(-1, nodes - 1).expand(rows, -1))
        span = Span(torch.arange(rows), range(rows), torch.full((rows,), start), mask, nodes, length)
        tokens = torch.randint(VOCAB, (rows * nodes,))
        with torch.inference_mode():
            decoder(tokens, cache, cache.view([span]))  # makes the tables of the rotation
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                decoder(tokens, cache, cache.view([span]))
        events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
        given = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
        peak = max(accumulate(size for _, size in given))
        said = step_bytes(decoder.config, decoder.config.latent, dtype, FORMATS[form], rows, nodes, length)
        assert said == pytest.approx(peak, rel=0.03), (rows, nodes, start)


def test_the_forecast_counts_it(directory: Path) -> None:
    """With the context, in which masks grow."""
    asked = EngineSettings(
        EngineConfig(device="cpu", dtype="bfloat16", max_seq_len=4096, max_batch_size=2, max_num_tokens=512),
        KVCacheConfig(), SpeculativeConfig(),
    )  # fmt: skip
    found = forecast(directory, None, asked, memory=2**40).activations
    short = asked._replace(engine=asked.engine.model_copy(update={"max_seq_len": 512}))
    heads = load_decoder(directory, torch.bfloat16, "cpu").config.num_heads
    assert found - forecast(directory, None, short, memory=2**40).activations > 512 * heads * (4096 - 512) * 2
