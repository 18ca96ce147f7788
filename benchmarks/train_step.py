"""The training step of an EAGLE-3 head against a plain one and against speculators', in turn, on the same batch.

    python benchmarks/train_step.py [--speculators PYTHON] [--rounds 8] [--steps 7] [--rows 1] [--out FILE.json]

A step is forward of all unrolled steps, loss, backward and AdamW, from the target's hidden states in memory: the target
itself is left out, since speculators reads its states from disk. Weights, batch, dtype (bfloat16 under autocast,
float32 weights) and the number of threads (one) are the same. The plain one attends densely to a mask of keys times
steps and keeps all scores, as a reading of the method would be written down. Figures are ratios of processor time in
one run, as the median over rounds with the sides in turn; seconds are recorded with the load that others cause.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from sametoken import embedded
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle3.objective import Eagle3Objective
from sametoken.heads.write import write_head
from sametoken.learning.batch import Batch, guess_weights
from sametoken.learning.target import Features, OuterLayers
from sametoken.train.parallel import Parallel
from sametoken.train.settings import HeadSettings, LossSettings
from sametoken.train.targets import read_outer

PEER = Path(__file__).parent / "train_peers" / "speculators_step.py"
ATTENTIONS = ("eager", "sdpa")  # of speculators, where nothing is compiled for a GPU
SHARE = 0.6  # of the tokens that count
LENGTHS = (40, 400)  # of documents


class Problem:
    """A batch with random features, and heads that begin alike."""

    def __init__(self, rows: int, row: int, steps: int) -> None:
        self.outer = read_outer(embedded.TARGET, torch.bfloat16, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        lengths: list[int] = []
        while sum(lengths) < rows * row:
            lengths.append(int(torch.randint(*LENGTHS, (), generator=generator)))
        lengths[-1] -= sum(lengths) - rows * row
        documents = []
        for length in lengths:
            tokens = torch.randint(self.outer.config.vocab_size, (length,), generator=generator)
            documents.append((tokens, torch.arange(length) >= (1 - SHARE) * length))
        self.batch, self.steps = Batch.of(documents), steps
        width = self.outer.config.hidden_size
        count = len(self.batch.tokens)
        taps, last = (torch.randn(count, size, generator=generator).bfloat16() for size in (3 * width, width))
        self.features = Features(taps, last)

    def head(self) -> EagleHead:
        target = self.outer.config
        config = Eagle3Objective.configure(HeadSettings(), target, target.vocab_size)
        head = Eagle3Objective.create(config, self.outer.head, None, torch.Generator().manual_seed(0))
        assert isinstance(head, EagleHead)
        return head


def ours(problem: Problem) -> Callable[[], float]:
    """The step of `sametoken train`."""
    settings = LossSettings(ttt_steps=problem.steps)
    objective = Eagle3Objective(problem.head(), problem.outer, settings, torch.bfloat16)
    weights = guess_weights(problem.batch, problem.steps, 0.8, per_document=False)
    optimiser = torch.optim.AdamW(objective.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimiser.zero_grad(set_to_none=True)
        loss, _ = objective(problem.batch, problem.features, weights.weights / weights.total)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def plain(problem: Problem) -> Callable[[], float]:
    """The same in the obvious way: masks of keys times steps, all scores kept, autograd throughout."""
    head, outer, batch = problem.head(), problem.outer, problem.batch
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    weights = guess_weights(batch, problem.steps, 0.8, per_document=False)
    shares = weights.weights / weights.total
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-4)
    at, document = torch.arange(len(batch.tokens)), batch.documents
    first = (at.unsqueeze(1) >= at) & (document.unsqueeze(1) == document)
    own = torch.eye(len(at), dtype=torch.bool)

    def step() -> float:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = _plain_loss(head, outer, batch, problem.features, shares, [first, own])
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def _plain_loss(
    head: EagleHead, outer: OuterLayers, batch: Batch, features: Features, shares: Tensor, masks: list[Tensor]
) -> Tensor:
    teacher = F.linear(features.last, outer.head).float().softmax(-1)
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        keys.append(k)
        values.append(v)
        mask = torch.cat([masks[0], *[masks[1]] * (len(keys) - 1)], dim=1)
        k, v = (torch.cat(each).transpose(0, 1).unsqueeze(0) for each in (keys, values))
        q = q.transpose(0, 1).unsqueeze(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return mixed.squeeze(0).transpose(0, 1).flatten(1)

    hidden, loss = head.fuse(features.taps), torch.zeros(())
    for k in range(len(shares)):
        rope = tuple(part.to(hidden.dtype) for part in head.rotation(batch.positions + k))
        output = head(F.embedding(batch.ahead(1 + k), outer.vectors), hidden, (rope[0], rope[1]), attend)
        guess = head.logits(output).float().log_softmax(-1)
        ahead = torch.arange(1 + k, 1 + k + len(guess)).clamp(max=len(guess) - 1)
        weights = F.pad(shares[k][1 + k :], (0, 1 + k))
        loss = loss + (F.kl_div(guess, teacher[ahead], reduction="none").sum(-1) * weights).sum()
        hidden = head.recycle(output)
    return loss


class Peer:
    """speculators in its own environment, told to step one at a time."""

    def __init__(self, python: str, attention: str, problem: Problem, place: Path) -> None:
        place = place / attention
        place.mkdir()
        target = str(embedded.TARGET)
        write_head(problem.head(), place / "head", problem.outer.config, layout="speculators", target_name=target)
        batch = problem.batch
        tensors = {
            "tokens": batch.tokens, "mask": batch.mask, "documents": batch.documents, "positions": batch.positions,
            "taps": problem.features.taps, "last": problem.features.last, "vectors": problem.outer.vectors.clone(),
        }  # fmt: skip
        save_file(tensors, place / "batch.safetensors")
        self._process = subprocess.Popen(
            [python, str(PEER), str(place), str(problem.steps), attention], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.hello = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("speculators ended; its error is above")
        return line

    def __call__(self) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        said = json.loads(self._line())
        return said["cpu_s"], said["wall_s"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def timed(step: Callable[[], float]) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        return time.process_time() - cpu, time.perf_counter() - wall

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators", help="python of an environment that has speculators")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7, help="unrolled steps")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--row", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--out", help="JSON file for the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Parallel("cpu", fsdp=False)  # memory as in a real run
    problem = Problem(options.rows, options.row, options.steps)
    sides: dict[str, Callable[[], tuple[float, float]]] = {"ours": timed(ours(problem)), "plain": timed(plain(problem))}
    with tempfile.TemporaryDirectory() as place:
        attentions = ATTENTIONS if options.speculators is not None else ()
        peers = {name: Peer(options.speculators, name, problem, Path(place)) for name in attentions}
        sides |= {f"speculators, {name} attention": peer for name, peer in peers.items()}
        loads: list[float] = []
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):
            loads.append(os.getloadavg()[0])
            for name, side in sides.items():
                found = side()
                if number:  # the first round warms up
                    times[name].append(found)
        hellos = [peer.hello for peer in peers.values()]
        for peer in peers.values():
            peer.close()
    record = report(problem, times, loads, hellos)
    print(json.dumps(record, indent=2))
    if options.out:
        Path(options.out).write_text(json.dumps(record, indent=2) + "\n")


def report(
    problem: Problem, times: dict[str, list[tuple[float, float]]], loads: list[float], peers: object
) -> dict[str, object]:
    """Ratios to ours round by round, and what they were measured on."""
    tokens = len(problem.batch.tokens)
    ratios = {
        name: [theirs[0] / mine[0] for theirs, mine in zip(found, times["ours"], strict=True)]
        for name, found in times.items()
    }
    config = problem.head().config
    assert isinstance(config, EagleConfig)
    return {
        "tokens": tokens, "documents": len(problem.batch.lengths), "unrolled_steps": problem.steps,
        "hidden": config.layers.hidden_size, "draft_vocabulary": config.draft_vocab_size, "threads": 1,
        "torch": torch.__version__, "peers": peers,
        "cpu_time_over_ours": {
            name: {"median": statistics.median(each), "least": min(each), "most": max(each)}
            for name, each in ratios.items()
        },
        "tokens_per_cpu_second": {
            name: tokens / statistics.median(cpu for cpu, _ in found) for name, found in times.items()
        },
        "seconds": times, "load_of_the_machine": loads,
    }  # fmt: skip


if __name__ == "__main__":
    main()
