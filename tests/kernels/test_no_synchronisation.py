"""A captured step never waits for a value: run on tensors that have none, any look at one raises.

Fake tensors of a CUDA device need no GPU. What a look from the host would be there is an error here; copies between
host and device, which fake tensors allow, are watched for by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sametoken.drafters import tree
from sametoken.drafters.base import Drafter
from sametoken.drafters.device import Plain, Proposer
from sametoken.drafters.padded import NO_GUESS, chain
from sametoken.engine.captured import decode_step
from sametoken.engine.plan import Decode, Plan, PromptPiece
from sametoken.engine.runner import Runner
from sametoken.heads.draft_model.drafts import DraftModelDrafter
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafter import EagleDrafter
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.drafter import MedusaDrafter
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Code, Coded
from sametoken.options.sampling import SamplingParams
from sametoken.runtime.cache import KVCache, PageTable
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.speculation import draft
from sametoken.speculation.sampling import RowSampling, Sampling

CUDA = torch.device("cuda", 0)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
DEPTH = 3
TREE = ((0,), (1,), (0, 0), (2,), (1, 0), (0, 0, 0))
METHODS = ("plain", "draft", "draft tree", "eagle1", "eagle3", "eagle1 tree", "eagle3 tree", "medusa")
M = TypeVar("M", Decoder, EagleHead, MedusaHeads)


class Watch(TorchDispatchMode):
    """Refuses operators that carry values from the host to the device or back, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        assert "lift_fresh" not in name, "a tensor was made of Python numbers"
        devices = {x.device.type for x in (*args, result) if isinstance(x, Tensor) and x.dim() > 0}
        assert devices <= {"cuda"}, f"{name} on {devices}"
        self.count += 1
        return result


ATEN = torch.ops.aten
UNGUARDED = {Tensor.contiguous: ATEN.clone, Tensor.copy_: ATEN.copy_, Tensor.__invert__: ATEN.bitwise_not}


class Guardless(TorchFunctionMode):
    """Torch built for the CPU refuses a few calls on a CUDA device before it sees that the tensors are fake."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            part, places = self._part(*args)
            return ATEN.index(part, places) if places else part
        if func is Tensor.__setitem__:
            part, places = self._part(*args[:2])
            return ATEN.index_put_(part, places, args[2]) if places else ATEN.copy_(part, args[2])
        if func is F.rms_norm:
            scale = (args[0].float().pow(2).mean(-1, keepdim=True) + kwargs["eps"]).rsqrt()
            return args[0] * scale.to(args[0].dtype) * kwargs["weight"]
        return UNGUARDED.get(func, func)(*args, **(kwargs or {}))

    def _part(self, x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
        """The view that the slices of an index make, and its tensors by dimension of that view."""
        parts = list(index) if isinstance(index, tuple) else [index]
        for place, part in enumerate(parts):
            if part is Ellipsis:
                parts[place : place + 1] = [slice(None)] * (x.dim() + 1 - len(parts))
        places: list[Tensor | None] = []
        for part in parts:
            at = len(places)
            if isinstance(part, list):
                part = torch.tensor(part, device=x.device)
            if isinstance(part, int):
                x = x.select(at, part)
                continue
            if isinstance(part, slice):
                x = ATEN.slice(x, at, part.start, part.stop)
            places.append(part if isinstance(part, Tensor) else None)
        return x, places if any(place is not None for place in places) else []


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    kept = (draft._kept, tree._kept_written)  # a fake tensor must not outlive its mode
    for function in kept:
        function.cache_clear()
    with FakeTensorMode(), Guardless():
        yield
    for function in kept:
        function.cache_clear()


def made(module: Callable[[], M]) -> M:
    """A module on the fake device, its rotary tables there, as they are before any capture."""
    with CUDA:
        found = module()
    positions = torch.zeros(1, dtype=torch.int64, device=CUDA)
    if isinstance(found, Decoder):
        found.rotations(positions)
    elif isinstance(found, EagleHead):
        found.rotation(positions)
    return found


def proposer_of(method: str, target: Decoder, config: ModelConfig, table: PageTable) -> Proposer:
    if method == "plain":
        return Plain()
    found = drafter_of(method, target, config, table).captured()
    assert found is not None
    return found


def drafter_of(method: str, target: Decoder, config: ModelConfig, table: PageTable) -> Drafter:
    kind, *branching = method.split()
    options: dict[str, Any] = {"max_draft_len": DEPTH}
    if kind == "medusa":
        medusa = MedusaConfig(3, 1, config.hidden_size, config.vocab_size, choices=TREE)
        drafter: Drafter = MedusaDrafter(made(lambda: MedusaHeads(medusa, torch.bfloat16)), target, **options)
    else:
        options |= {"branches": 3, "budget": 7} if branching else {}
        cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, torch.bfloat16, CUDA)
        if kind == "draft":
            drafter = DraftModelDrafter(made(lambda: Decoder(config, torch.bfloat16)), cache, **options)
        else:
            version = int(kind[-1])
            one = replace(config, num_layers=1, sliding_windows=(None,))
            old = {"own_head": False, "last_norm": False} if version == 1 else {}
            reduced = config.vocab_size if version == 1 else 40
            facts = EagleConfig(one, version, () if version == 1 else (0, 1), config.hidden_size, reduced, **old)
            head = made(lambda: EagleHead(facts, torch.bfloat16))
            drafter = EagleDrafter(head, target, cache, **options)
    return drafter


def parts(batch: int, method: str) -> tuple[Runner, Proposer, GraphSlots]:
    table = PageTable(batch, 64, 16, 16, CUDA)
    config = ModelConfig.from_hf(LLAMA)
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, torch.bfloat16, CUDA)
    runner = Runner(made(lambda: Decoder(config, torch.bfloat16)), cache, ())
    proposer = proposer_of(method, runner.decoder, config, table)
    width = len(proposer.taps) * config.hidden_size
    return runner, proposer, GraphSlots.empty(batch, proposer.depth, proposer.nodes, CUDA, width, torch.bfloat16)


RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    "candidates": {"temperature": 0.8, "top_k": 20},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "edited": {"temperature": 0.8, "logit_bias": {3: 1.0}, "min_tokens": 4},
}


@pytest.mark.cover
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_looks_at_no_value(method: str, batch: int, rule: str) -> None:
    runner, proposer, graph_slots = parts(batch, method)
    params = SamplingParams(**RULES[rule], seed=1)
    sampling = Sampling.of([RowSampling(params, 1, [1], 96, (2,), device=CUDA)] * batch)
    with Watch() as watch:
        decode_step(runner, proposer, graph_slots, sampling, 512)
    assert watch.count > 100
    assert graph_slots.emitted.shape == (batch, 1 + proposer.depth + proposer.nodes)


class Answers(TorchFunctionMode):
    """Answers a look at a number with 0, and a question with `truth`, so that both branches run."""

    def __init__(self, truth: bool) -> None:
        super().__init__()
        self.truth = truth

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            found: Any = 0
            for size in reversed(args[0].shape):
                found = [found] * size
            return found
        if func in (Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.min, Tensor.max) and args[0].dim() == 0:
            return 0
        if func in (Tensor.__bool__, torch.equal):
            return self.truth
        return func(*args, **(kwargs or {}))


@pytest.mark.cover
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("truth", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_hosts_step_mixes_no_devices(method: str, truth: bool, rule: str) -> None:
    """Prompts, guesses, forward, draw, verification and what drafters observe; padding where a row's limit is short."""
    table = PageTable(2, 64, 16, 16, CUDA)
    config = ModelConfig.from_hf(LLAMA)
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, torch.bfloat16, CUDA)
    target = made(lambda: Decoder(config, torch.bfloat16))
    drafter = None if method == "plain" else drafter_of(method, target, config, table)
    runner = Runner(target, cache, () if drafter is None else drafter.taps)
    rows = [RowSampling(SamplingParams(**RULES[rule], seed=1), 1, [1], 96, (2,), device=CUDA) for _ in range(2)]
    prompt, known = [3, 4, 5], [[3, 4, 5], [3, 4, 5]]
    with Answers(truth):
        pieces = tuple(PromptPiece(row, 0, tuple(prompt), last=True) for row in range(2))
        read = runner.forward(Plan(prefill=pieces), [], [], lambda at: Sampling.of([rows[i] for i in at]))
        for step in range(3):
            pending, guesses = [0, 0], [NO_GUESS] * 2
            if drafter is not None:
                if step == 0:
                    for row in range(2):
                        drafter.admit(row, [])
                features = None if read.features is None else torch.cat([*read.features])
                drafter.observe([0, 1], known, features)
                guesses = drafter.propose([0, 1], pending, [DEPTH, 1], Sampling.of(rows)).drafts
            start = 3 + step
            decode = tuple(Decode(row, DEPTH, start=start) for row in range(2))
            read = runner.forward(Plan(decode=decode), pending, guesses, lambda at: Sampling.of([rows[i] for i in at]))
            known = [[0], [0]]
            assert len(read.paths) == 2
            for row in rows:
                row.extend([0])


def test_a_look_would_be_noticed() -> None:
    """The engine's own step compares the accepted path on the host."""
    runner, _, _ = parts(2, "plain")
    guesses = [chain([0, 0])] * 2
    sampling = Sampling.of([RowSampling(SamplingParams(temperature=0.0), 1, [1], 96, device=CUDA)] * 2)
    plan = Plan(decode=(Decode(0, 2, start=4), Decode(1, 2, start=4)))
    with pytest.raises(DataDependentOutputException):
        runner.forward(plan, [0, 0], guesses, lambda at: sampling)
    with pytest.raises(AssertionError, match="Python numbers"), Watch():
        torch.tensor([1, 2], device=CUDA)


@pytest.mark.parametrize(
    ("code", "codes", "scale", "group"),
    [
        (Code.FP8, torch.float8_e4m3fn, torch.float32, 128),
        (Code.FP4, torch.uint8, torch.float8_e4m3fn, 16),
        (Code.FP4, torch.uint8, torch.float8_e8m0fnu, 32),
        (Code.INT4, torch.uint8, torch.float16, 128),
        (Code.INT8, torch.int8, torch.bfloat16, 256),
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_weights_of_other_tools_are_multiplied_without_a_look(
    code: Code, codes: torch.dtype, scale: torch.dtype, group: int, deterministic: bool
) -> None:
    each = 2 if codes == torch.uint8 else 1
    groups = 256 // group
    with CUDA:
        weight = Coded(
            code, torch.empty(64, 256 // each, dtype=codes), torch.empty(64, groups, dtype=scale), 256, group,
            factor=torch.empty(64), divided=True,
            zero=torch.empty(64, groups, dtype=torch.int8) if code in (Code.INT4, Code.INT8) else None,
            order=torch.empty(256, dtype=torch.int32) if code is Code.INT4 else None,
        )  # fmt: skip
        x = torch.empty(5, 256, dtype=torch.bfloat16)
    with Watch() as watch:
        y = weight.linear(x, deterministic)
    assert (y.shape, y.dtype, y.device) == ((5, 64), torch.bfloat16, CUDA)
    assert watch.count > 3
