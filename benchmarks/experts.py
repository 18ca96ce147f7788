"""What verifying several nodes costs on a mixture of experts: a step's time against its nodes, and the memory's floor.

Random weights of a Qwen3-MoE shape, 8 of 128 experts, in one compiled call and layer by layer in torch, beside the
dense decoder that computes as much per token. Nodes choose experts independently, so a step reads the union of their
choices. The floor is the bytes of all weights that a step reads over the speed of a probe that was timed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from sametoken.kernels.cpu.threads import serial_torch
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.experts import Experts
from sametoken.model.formats.names import FORMATS
from sametoken.model.linear import Linear
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import chain_mask

NODES = (1, 2, 3, 5, 8, 16, 32)
CONTEXT, PAGE, WIDTH = 64, 32, 384
PROBE = 2**28  # bytes
SHAPE = {
    "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256,
}  # fmt: skip
SPARSE = {
    "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 8 * WIDTH, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": WIDTH, "norm_topk_prob": True,
}  # fmt: skip
DENSE = {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 8 * WIDTH}


class Model:
    """A decoder with random weights and a cache, and what its steps read."""

    def __init__(self, stated: dict[str, object], format: str) -> None:
        self.decoder = Decoder(ModelConfig.from_hf({**SHAPE, **stated}), torch.bfloat16, FORMATS.get(format))
        for module in list(self.decoder.modules()):
            for parameter in module.parameters(recurse=False):
                torch.nn.init.normal_(parameter, std=0.05) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
            if hasattr(module, "pack"):
                module.pack()
        config = self.decoder.config
        table = PageTable(1, 16, 8, PAGE, "cpu")
        table.extend(0, range(1, 9))
        self.cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, torch.bfloat16, "cpu")
        linears = [each for each in self.decoder.modules() if isinstance(each, Linear) and each.native is not None]
        self.nbytes = sum(each.native.nbytes for each in linears if each.native is not None)
        mixtures = [each for each in self.decoder.modules() if isinstance(each, Experts)]
        self.expert_nbytes = sum(
            linear.native.nbytes for each in mixtures for linear in each.modules()
            if isinstance(linear, Linear) and linear is not each.router and linear.native is not None
        )  # fmt: skip

    def step(self, nodes: int) -> float:
        """Seconds of one step of a chain of `nodes` random tokens after CONTEXT committed ones."""
        starts = torch.tensor([CONTEXT])
        span = Span(torch.zeros_like(starts), (0,), starts, chain_mask(1, nodes), nodes, CONTEXT + nodes)
        tokens = torch.randint(SHAPE["vocab_size"], (nodes,))  # type: ignore[arg-type]
        begin = time.perf_counter()
        self.decoder.logits(self.decoder.run(tokens, self.cache, [span]).last)
        return time.perf_counter() - begin

    def layer_by_layer(self, nodes: int) -> float:
        """The same in torch, with one call of the kernels for each product."""
        native, self.decoder.__dict__["native"] = self.decoder.native, None
        seconds = self.step(max(2, nodes))
        self.decoder.__dict__["native"] = native
        return seconds

    def experts_read(self, nodes: int) -> float:
        """Experts that a layer reads in a step, on average."""
        counts: list[int] = []

        def count(module: Experts, inputs: tuple[torch.Tensor]) -> None:
            _, chosen = module.route(module.router(inputs[0])[:nodes, : module.config.count])
            counts.append(len(set(chosen.flatten().tolist())))

        hooks = [m.register_forward_pre_hook(count) for m in self.decoder.modules() if isinstance(m, Experts)]
        for _ in range(8 * bool(hooks)):
            self.layer_by_layer(nodes)
        for hook in hooks:
            hook.remove()
        return statistics.mean(counts) if counts else 0.0

    def floor(self, read: float) -> float:
        """Bytes that a step reads where each layer reads so many experts."""
        experts = self.decoder.config.experts
        return self.nbytes - self.expert_nbytes * (1 - read / experts.count if experts is not None else 0.0)


def least(work: Callable[[int], float], nodes: int, repeats: int) -> float:
    """Other programs only add to a time."""
    return min(work(nodes) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="of which the shortest counts, in each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--format", choices=["bfloat16", *FORMATS], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    probe = torch.ones(PROBE // 8, dtype=torch.int64)
    with torch.inference_mode():
        sparse, dense = Model(SPARSE, options.format), Model(DENSE, options.format)
        read = {nodes: sparse.experts_read(nodes) for nodes in NODES}
        rows: dict[int, list[list[float]]] = {nodes: [] for nodes in NODES}
        speeds = []
        for _ in range(options.rounds):
            for nodes in NODES:
                begin = time.perf_counter()
                probe.sum()
                speeds.append(PROBE / (time.perf_counter() - begin))
                with serial_torch():
                    works = sparse.step, sparse.layer_by_layer, dense.step
                    rows[nodes].append([least(work, nodes, options.repeats) for work in works])
    speed = statistics.median(speeds)
    print(f"{options.format}, probe {speed / 1e9:.1f} GB/s ({min(speeds) / 1e9:.1f} to {max(speeds) / 1e9:.1f})\n")
    titles = "experts read", "floor, ms", "one call, ms", "of the floor", "one node = 1", "torch, ms", "dense, ms"
    print(f"| nodes | {' | '.join(titles)} | one node = 1 |")
    print("|---|---|---|---|---|---|---|---|---|")
    times = {nodes: [statistics.median(column) for column in zip(*found, strict=True)] for nodes, found in rows.items()}
    first = times[NODES[0]]
    for nodes, (one, many, other) in times.items():
        floor = sparse.floor(read[nodes]) / speed
        cells = [f"{read[nodes]:.0f}", f"{floor * 1e3:.2f}", f"{one * 1e3:.2f}", f"{floor / one:.0%}"]
        cells += [f"{one / first[0]:.2f}", f"{many * 1e3:.2f}", f"{other * 1e3:.2f}", f"{other / first[2]:.2f}"]
        print(f"| {nodes} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
