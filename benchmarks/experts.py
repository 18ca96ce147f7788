"""What verifying several nodes costs on a mixture of experts: milliseconds of a step against its nodes.

Random weights of a small Qwen3-MoE shape, 8 of 128 experts, beside the dense decoder that computes as much per token.
Nodes of one step choose experts independently, so a step reads the union of their choices.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.experts import Experts
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import chain_reach

NODES = (1, 2, 3, 5, 8, 16, 32)
CONTEXT, PAGE, WIDTH = 64, 32, 192
SHAPE = {
    "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 256,
}  # fmt: skip
SPARSE = {
    "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 8 * WIDTH, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": WIDTH, "norm_topk_prob": True,
}  # fmt: skip
DENSE = {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 8 * WIDTH}


def build(stated: dict[str, object]) -> Decoder:
    decoder = Decoder(ModelConfig.from_hf({**SHAPE, **stated}), torch.bfloat16)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    for module in list(decoder.modules()):
        if hasattr(module, "pack"):
            module.pack()
    return decoder


def step(decoder: Decoder, cache: KVCache, nodes: int) -> float:
    """Seconds of one step of a chain of `nodes` random tokens after CONTEXT committed ones."""
    starts = torch.tensor([CONTEXT])
    span = Span(torch.zeros_like(starts), (0,), starts, chain_reach(1, nodes), nodes, CONTEXT + nodes)
    tokens = torch.randint(SHAPE["vocab_size"], (nodes,))  # type: ignore[arg-type]
    begin = time.perf_counter()
    decoder.logits(decoder.run(tokens, cache, [span]).last)
    return time.perf_counter() - begin


def measured(stated: dict[str, object], repeats: int) -> tuple[list[float], list[float]]:
    """Least milliseconds of a step (other programs only add), and the experts that a layer reads, by NODES."""
    decoder = build(stated)
    table = PageTable(1, 16, 8, PAGE, "cpu")
    table.extend(0, range(1, 9))
    config, counts = decoder.config, []
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, torch.bfloat16, "cpu")

    def count(module: Experts, inputs: tuple[torch.Tensor]) -> None:
        _, chosen = module.route(module.router(inputs[0])[:, : module.config.count])
        counts.append(len(set(chosen.flatten().tolist())))

    times, read = [], []
    for nodes in NODES:
        times.append(min(step(decoder, cache, nodes) for _ in range(repeats)) * 1e3)
        hooks = [each.register_forward_pre_hook(count) for each in decoder.modules() if isinstance(each, Experts)]
        counts.clear()
        for _ in range(8 * bool(hooks)):
            step(decoder, cache, nodes)
        read.append(statistics.mean(counts) if counts else 0.0)
        for hook in hooks:
            hook.remove()
    return times, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        sparse, read = measured(SPARSE, options.repeats)
        dense, _ = measured(DENSE, options.repeats)
    print("| nodes | experts read of 128 | ms, 8 of 128 experts | times one node | ms, dense | times one node |")
    print("|---|---|---|---|---|---|")
    for nodes, experts, mine, other in zip(NODES, read, sparse, dense, strict=True):
        ratios = mine / sparse[0], other / dense[0]
        print(f"| {nodes} | {experts:.0f} | {mine:.2f} | {ratios[0]:.2f} | {other:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
