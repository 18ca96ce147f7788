"""The time of a step by context, with keys and values stored as numbers or as codes, and the loss on a text.

    python benchmarks/kv_cache.py [--contexts 4096,16384] [--nodes 1,5] [--rounds 7] [--layers 16] [--narrow]
        [--weights bfloat16|int8|int4] [--dtypes auto,int8,fp8] [--threads 2] [--clock wall|cpu]
    python benchmarks/kv_cache.py --loss

The loss is the embedded target's, on the pages in docs and on texts that it samples itself, in windows of 900 tokens.
The times are of random weights of a Llama shape of a billion parameters; --narrow leaves out all but attention. Figures
of the dtypes alternate within a round, and ratios are taken round by round, so that other load cancels. The floor is
the time to read weights and cache once, at the speed at which a probe beside the step reads memory.
--clock cpu counts processor seconds, for a busy machine: use one thread, since threads that wait for others count too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sametoken import LLM, SamplingParams
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.names import FORMATS as WEIGHTS
from sametoken.prompts.sources import BUILT_IN
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.runtime.kv_format import FORMATS
from sametoken.speculation.draft import chain_mask

PAGE, DTYPES, WINDOW = 32, ("auto", "int8", "fp8"), 900
DOCS = Path(__file__).parents[1] / "docs"
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 65536,
}  # fmt: skip
PROBE = torch.ones(2**26, dtype=torch.int64)  # 512 MB
NARROW = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256}


def build(layers: int, narrow: bool, weights: str) -> tuple[Decoder, int]:
    """A decoder, and the bytes of its weights that a step reads."""
    stated = {**SHAPE, "num_hidden_layers": layers, **(NARROW if narrow else {})}
    decoder = Decoder(ModelConfig.from_hf(stated), torch.bfloat16, WEIGHTS.get(weights))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    packed = [module for module in decoder.modules() if hasattr(module, "pack")]
    read = sum(
        parameter.numel() for module in packed if module is not decoder.embed for parameter in module.parameters()
    )
    for module in packed:
        module.pack()
    return decoder, int(read * {"bfloat16": 2, "int8": 1, "int4": 0.5}[weights])


def cache_of(decoder: Decoder, dtype: str, context: int, nodes: int) -> KVCache:
    """A cache of one row whose tokens hold random keys and values, with room for `nodes` more."""
    config, pages = decoder.config, -(-(context + nodes) // PAGE)
    table = PageTable(1, pages + 1, pages, PAGE, "cpu")
    table.extend(0, range(1, pages + 1))
    cache = KVCache(
        config.num_layers, config.num_kv_heads, config.head_dim, table, torch.bfloat16, "cpu", FORMATS[dtype]
    )
    slots = torch.arange(PAGE, PAGE + context)
    for layer in range(config.num_layers):
        x = torch.randn(2, context, config.num_kv_heads, config.head_dim).bfloat16()
        cache.write(layer, slots, x[0], x[1])
    return cache


def step(decoder: Decoder, cache: KVCache, context: int, nodes: int, clock: Callable[[], float]) -> float:
    """Seconds of one step of a chain of `nodes` tokens after `context` committed ones."""
    starts, tokens = torch.tensor([context]), torch.arange(nodes)
    span = Span(torch.zeros_like(starts), (0,), starts, chain_mask(1, nodes), nodes, context + nodes)
    begin = clock()
    decoder.logits(decoder.run(tokens, cache, [span]).last)
    return clock() - begin


def floor(weights: int, cache: KVCache, context: int) -> float:
    """Seconds to read `weights` bytes and all keys and values of a row once, as fast as a sum reads memory."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        PROBE.sum()
        seconds.append(time.perf_counter() - begin)
    slots = cache.table.pages * cache.table.page_size
    stored = sum(tensor.nbytes for tensor in (cache.keys, cache.values)) * context // slots
    return (weights + stored) * min(seconds) / PROBE.nbytes


def losses(llm: LLM, texts: list[list[int]]) -> list[float]:
    """The negative log-likelihood of each token but the first of each text, in nats."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = (completion.prompt_logprobs or [] for completion in llm.generate(texts, asked))
    return [-each.logprob for text in scored for each in text if each is not None]


def print_losses() -> None:
    engines = {dtype: LLM("embedded", kv_cache_dtype=dtype) for dtype in DTYPES}
    plain = engines["auto"]
    pages = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    ids = plain.tokenizer.encode(pages)[: 20 * WINDOW]
    params = [
        SamplingParams(temperature=1, max_tokens=300, ignore_eos=True, seed=seed) for seed in range(len(BUILT_IN))
    ]
    sampled = plain.generate(list(BUILT_IN), params)
    texts = {
        "docs": [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)],
        "samples": [[*each.prompt_token_ids, *each.token_ids] for each in sampled],
    }
    for name, windows in texts.items():
        found = {dtype: torch.tensor(losses(llm, windows)) for dtype, llm in engines.items()}
        for dtype, loss in found.items():
            change = loss - found["auto"]
            spread = float(change.std()) / len(change) ** 0.5
            print(f"{name}, {len(loss)} tokens, {dtype}: {loss.mean():.4f}, change {change.mean():+.5f} ({spread:.5f})")


def print_times(chosen: argparse.Namespace) -> None:
    clock = time.process_time if chosen.clock == "cpu" else time.perf_counter
    with torch.inference_mode():
        decoder, weights = build(chosen.layers, chosen.narrow, chosen.weights)
        dtypes = chosen.dtypes.split(",")
        for context in map(int, chosen.contexts.split(",")):
            widths = [int(nodes) for nodes in chosen.nodes.split(",")]
            caches = {dtype: cache_of(decoder, dtype, context, max(widths)) for dtype in dtypes}
            for nodes in widths:
                rounds = []
                for _ in range(chosen.rounds + 1):
                    floors = {dtype: floor(weights, cache, context) for dtype, cache in caches.items()}
                    rounds.append(
                        {
                            dtype: (step(decoder, caches[dtype], context, nodes, clock), floors[dtype])
                            for dtype in dtypes
                        }
                    )
                for dtype in dtypes:
                    ratios = sorted(each[dtype][0] / each[dtypes[0]][0] for each in rounds[1:])
                    shares = sorted(least / taken for taken, least in (each[dtype] for each in rounds[1:]))
                    least = min(each[dtype][0] for each in rounds[1:]) * 1e3
                    print(
                        f"context {context} nodes {nodes} {dtype}: {least:.1f} ms least, ratio to {dtypes[0]} "
                        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), floor / step "
                        f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="4096,16384")
    parser.add_argument("--nodes", default="1,5")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--weights", choices=("bfloat16", "int8", "int4"), default="int8")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of keys and values; ratios are to the first")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--loss", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.loss:
        print_losses()
    else:
        print_times(chosen)


if __name__ == "__main__":
    main()
