"""Every family with every kind of head: converts, trains, exports, reloads and serves what plain decoding says.

Each cell is held against `docs/support.json`, which `make support` writes from these tests and turns into a page.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

import sametoken.train
from cli_checks import speak
from engine_checks import alone, check_idle, make_llm, prompts, said, sharpen
from head_checks import shape_of
from matrix import mark
from sametoken import Completion, SamplingParams
from sametoken.heads.kind import ENGINES
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.read import LoadedHead, read_head
from tiny_models import build
from training_checks import write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")
DOCS = Path(__file__).parents[2] / "docs"
RECORD = DOCS / "support.json"
WRITE = bool(os.environ.get("SAMETOKEN_WRITE_SUPPORT"))

# The rows of the page, each a tiny member of the family; together they have every part that a head must not copy.
FAMILIES = {
    "Llama 2": "llama-2",
    "Llama 3": "llama-3",
    "Llama 3.1": "llama-3.1",  # scaled rotation
    "Mistral": "mistral",  # a window on every block
    "Phi 3": "phi-3-long",  # fused projections, longrope, a window
    "Qwen 1.5": "qwen-1.5",  # biases
    "Qwen 2": "qwen-2",  # tied token vectors
    "Qwen 2.5": "qwen-2.5-yarn",
    "Qwen 3": "qwen-3",  # norms of queries and keys, heads wider than their share
    "Qwen 3 VL": "qwen-3-vl",  # a part that reads images, which is left out
    "Gemma 2": "gemma-2",  # norms before and after, scaled token vectors, capped scores
    "Gemma 3": "gemma-3",  # two rotations
    "OLMo 2": "olmo-2",  # norms after alone, and over all heads
    "OLMo 3": "olmo-3",  # the same with windows
    "Granite 3": "granite-3",  # multipliers
    "SmolLM 3": "smollm-3",  # blocks without rotation
    "GLM 4 (glm)": "glm",  # interleaved rotation of a part of each head
    "GLM 4 (glm4)": "glm-4",  # the same with norms after
    "Phi 4 mini": "phi-4-mini",  # rotation of a part of each head
    "Mixtral": "mixtral",  # experts, a window on every block
    "Qwen 2 MoE": "qwen-2-moe",  # a shared expert, blocks without experts
    "Qwen 3 MoE": "qwen-3-moe",
    "DeepSeek V2": "deepseek-v2",  # latent attention, experts from groups
    "DeepSeek V3": "deepseek-v3",  # the same, chosen by sigmoids and a bias
    "GLM 4.5 MoE": "glm-4.5-moe",  # chosen by sigmoids and a bias, from groups
    "Llama 4": "llama-4",  # attention in chunks, layers without rotation, weighted inputs of experts
    "gpt-oss": "gpt-oss",  # sinks, alternating windows, clamped activations
}
# Each other family has every part that `make test` meets here in one of these; `make test-thorough` runs all.
QUICK = ("Llama 3.1", "Gemma 3", "DeepSeek V3", "gpt-oss")
LAYERS = 7
# What a tiny member states layer by layer, by default for so many.
BY_LAYER = {
    "gemma-3": {"layer_types": None}, "olmo-3": {"layer_types": None}, "smollm-3": {"no_rope_layers": None},
    "llama-4": {"no_rope_layers": None},
}  # fmt: skip
# The columns, with the options of `sametoken train` and the configuration of `sametoken.train.convert`.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "Medusa": ("medusa", {"medusa_num_heads": 3, "medusa_num_layers": 1}),
    "EAGLE-1, EAGLE-2": ("eagle1", {"eagle_num_layers": 1}),
    "EAGLE-3": ("eagle3", {"eagle_num_layers": 1}),
}
REQUESTS = [
    (prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=12, ignore_eos=True, logprobs=2))
    for i, prompt in enumerate(prompts(4))
    for temperature in (0.0, 0.8)
]
# What is served, with how many branches: a chain, and EAGLE-2's tree. Medusa's tree is in our files, not in vLLM's.
SERVED = {"medusa": (("vllm", 1), ("hf", 1)), "eagle1": (("hf", 1), ("hf", 3)), "eagle3": (("vllm", 1), ("hf", 3))}


class Target(NamedTuple):
    """A tiny target on disk and what it says by itself."""

    name: str
    family: str
    directory: str
    expected: list[Completion]


class Cell(NamedTuple):
    """One cell under test: the command line, a place for files, and what becomes known of it."""

    target: Target
    mode: str
    options: dict[str, Any]
    run: Callable[..., Any]
    place: Path
    data: Path
    engines: list[str]

    @property
    def head(self) -> Path:
        return self.place / "trained" / "head"

    def read(self, directory: Path) -> LoadedHead:
        return read_head(directory, shape_of(self.target.directory), torch.float32, "cpu", pack=False)

    def call(self, *arguments: str) -> None:
        done = self.run(*arguments)
        assert done.code == 0, done.err


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=mark(name in QUICK or WRITE)) for name in FAMILIES
])  # fmt: skip
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Target:
    family, directory = FAMILIES[request.param], tmp_path_factory.mktemp("target")
    sharpen(member(family)).save_pretrained(directory)
    speak(directory)
    llm = make_llm(str(directory), cache={"enable_block_reuse": False})
    return Target(request.param, family, str(directory), [alone(llm, *asked) for asked in REQUESTS])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", 6)


def member(family: str) -> PreTrainedModel:
    """A tiny model of a family with blocks enough for EAGLE-3's taps."""
    return build(family, num_hidden_layers=LAYERS, **BY_LAYER.get(family, {}))


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def record(family: str, method: str, cell: dict[str, Any]) -> None:
    """Puts a cell into the record, in the order of the matrix."""
    known = recorded()
    known.setdefault(family, {})[method] = cell
    ordered = {name: {m: known[name][m] for m in METHODS if m in known[name]} for name in FAMILIES if name in known}
    RECORD.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


def converts(cell: Cell) -> None:
    """A transformers model takes the head, which alone learns from a batch, and saves it."""
    model = member(cell.target.family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sametoken.train.convert(model, [(cell.mode, cell.options)])
    tokens = torch.tensor([prompts(3)[2]])
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert loss.isfinite()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning
    assert all(name.startswith("sametoken.head.") for name in learning)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    model.save_pretrained(cell.place / "converted")
    cell.read(cell.place / "converted" / "head")


def trains(cell: Cell) -> None:
    """Three steps of `sametoken train` leave no weight of the head as it began and none of the target otherwise."""
    files = {file: file.read_bytes() for file in Path(cell.target.directory).iterdir()}
    options = [f"--{name}={value}" for name, value in cell.options.items()]
    cell.call(
        "train", cell.target.directory, "--data", str(cell.data), "--mode", cell.mode, *options, "--max-steps=3",
        "--train-bs=1", "--training-seq-len=48", "--logging-steps=1", "--lr=3e-3", "--threads=1",
        "--output-dir", str(cell.place / "trained"), *(["--ttt-steps=3"] if cell.mode == "eagle3" else []),
    )  # fmt: skip
    log = [json.loads(line) for line in (cell.place / "trained" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [1, 2, 3]
    assert all(0 < entry["loss"] < float("inf") for entry in log)
    assert {file: file.read_bytes() for file in files} == files


def exports(cell: Cell) -> None:
    """`sametoken export` writes the head for an engine, or names the engine that computes something else."""
    if cell.mode == "medusa":  # a measured tree, which is in the exported files then
        cell.call(
            "evaluate", str(cell.head), "--target", cell.target.directory, "--data", str(cell.data), "--threads=1",
            "--num-samples=6", "--osl=12", "--write-tree=8",
        )  # fmt: skip
    for engine, name in ENGINES.items():
        output = cell.place / engine
        done = cell.run("export", str(cell.head), "--to", engine, "--target", cell.target.directory, "--output", output)
        if done.code == 0:
            cell.engines.append(engine)
        else:
            assert f"{name} " in done.err
            assert "cannot run this head" in done.err
            assert not output.exists()
    assert "hf" in cell.engines
    assert "vllm" in cell.engines


def reloads(cell: Cell) -> None:
    """Every exported directory is the head that was trained, bit for bit, with the rotation it was trained with."""
    trained = cell.read(cell.head)
    weights = trained.module.state_dict()
    for engine in cell.engines:
        config, module, _ = cell.read(cell.place / engine)
        found = module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        added = found.keys() - weights.keys()  # SGLang always reads a bias of `fc`
        assert not any(found[name].any() for name in added)
        without = {"choices": ()} if isinstance(config, MedusaConfig) else {"fc_bias": False}  # vLLM's has no tree
        assert replace(config, **without) == replace(trained.config, **without)
    assert cell.read(cell.place / "hf").config == trained.config


def serves(cell: Cell) -> None:
    """Token ids, text and log-probabilities are those of plain decoding, and drafts were made."""
    for engine, branches in SERVED[cell.mode]:
        llm = make_llm(cell.target.directory, str(cell.place / engine), tree_top_k=branches)
        got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
        assert [said(each) for each in got] == [said(each) for each in cell.target.expected]
        assert all(each.speculation.drafted_by.get(llm.method, 0) > 0 for each in got)
        check_idle(llm.engine)


STEPS: dict[str, Callable[[Cell], None]] = {
    step.__name__: step for step in (converts, trains, exports, reloads, serves)
}


@pytest.mark.cover
@pytest.mark.parametrize("method", METHODS)
def test_cell(target: Target, method: str, data: Path, run: Any, tmp_path: Path) -> None:
    mode, options = METHODS[method]
    cell = Cell(target, mode, options, run, tmp_path, data, [])
    found: dict[str, Any] = {**dict.fromkeys(STEPS, False), "engines": cell.engines}
    try:
        for name, step in STEPS.items():
            step(cell)
            found[name] = True
    finally:
        if WRITE:
            record(target.name, method, found)
    assert recorded()[target.name][method] == found, "run `make support`"


def test_the_record_has_every_cell() -> None:
    assert {name: list(row) for name, row in recorded().items()} == {name: list(METHODS) for name in FAMILIES}
    assert all(list(cell) == [*STEPS, "engines"] for row in recorded().values() for cell in row.values())


def test_the_page_says_what_the_record_says() -> None:
    script = Path(__file__).parents[2] / "scripts" / "support_page.py"
    formats, published = (
        json.loads((DOCS / f"support_{name}.json").read_text(encoding="utf-8")) for name in ("formats", "published")
    )
    page = runpy.run_path(str(script))["page"](recorded(), formats, published)
    assert (DOCS / "support.md").read_text(encoding="utf-8") == page
