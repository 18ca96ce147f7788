"""Heads from files to text: an engine and the command line take a head as the draft and say what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from cli_checks import Pair, greedy
from engine_checks import alone, llama, make_llm, prompts, said
from head_checks import Reference, eagle_config, llm_with, random_weights, shape_of, weights_of
from sametoken import LLM, ConfigError, SamplingParams, SpeculativeConfig, embedded
from sametoken.commands.models import model_names
from sametoken.errors import CheckpointError, DraftMismatchError
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.objective import EagleObjective
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.modules import pack
from sametoken.heads.write import write_head

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS = ("eagle", "eagle3", "medusa")


@pytest.fixture(scope="module")
def heads(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A directory of every kind of head of the pair's target, by method."""
    root, shape = tmp_path_factory.mktemp("heads"), shape_of(tiny_pair.target)
    medusa = MedusaConfig(3, 1, shape.hidden_size, shape.vocab_size, choices=((0,), (1,), (0, 0)))
    made: dict[str, EagleHead | MedusaHeads] = {
        "eagle": EagleHead(eagle_config(shape, 1), torch.float32),
        "eagle3": EagleHead(eagle_config(shape, 3, draft_vocab_size=90), torch.float32),
        "medusa": MedusaHeads(medusa, torch.float32),
    }
    for method, head in made.items():
        random_weights(head)
        write_head(head, root / method, shape, target_name="tiny")
    return {method: str(root / method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_generate_with_a_head(run: Any, pair: Pair, heads: dict[str, str], method: str) -> None:
    answer = run(
        "generate", pair.target, "--draft", heads[method], "--prompt", "one two", "--max-tokens", "12",
        "--temperature", "0", "--json", "--no-adaptive",
    )  # fmt: skip
    assert answer.code == 0
    record = json.loads(answer.out)
    assert record["token_ids"] == greedy(pair.oracle, "one two", 12)
    assert record["speculation"]["method"] == method
    assert record["speculation"]["drafted"] > 0


def test_verify_and_bench_with_a_head(run: Any, pair: Pair, heads: dict[str, str]) -> None:
    proof = run("verify", pair.target, "--draft", heads["eagle3"], "--num-prompts", "2", "--max-tokens", "8")
    assert proof.code == 0
    assert "eagle3" in proof.out
    assert "all equal" in proof.out
    answer = run("bench", pair.target, "--draft", heads["medusa"], "--repeat", "1", "--limit", "1", "--output-len", "8")
    assert answer.code == 0
    assert "medusa" in answer.out


def test_auto_includes_the_head(run: Any, pair: Pair, heads: dict[str, str]) -> None:
    llm = LLM(pair.target, heads["eagle3"], {"method": "auto", "adaptive": False})
    (request,) = llm.make_requests([5, 6, 7], SamplingParams())
    assert request.methods == ("suffix", "eagle3")
    answer = run("generate", pair.target, "--draft", heads["eagle3"], "--method", "auto", "--prompt", "a", "--json")
    assert json.loads(answer.out)["speculation"]["method"] == "auto"


@pytest.mark.parametrize(
    ("given", "asked", "words"),
    [
        ("eagle", "eagle3", "needs an EAGLE-3 head, and the draft is an EAGLE-1 or EAGLE-2 head; use method 'eagle'"),
        ("eagle3", "eagle", "needs an EAGLE-1 or EAGLE-2 head, and the draft is an EAGLE-3 head"),
        ("medusa", "draft_target", "needs a draft model, and the draft is Medusa heads"),
        (None, "medusa", "needs Medusa heads: give draft=PATH"),
    ],
)
def test_a_head_of_another_kind_is_refused(
    pair: Pair, heads: dict[str, str], given: str | None, asked: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(pair.target, heads[given] if given else None, {"method": asked})


def test_a_head_of_another_target_is_refused(heads: dict[str, str], tmp_path: Path) -> None:
    other = llama(tmp_path, hidden_size=32)
    for directory in heads.values():
        with pytest.raises(DraftMismatchError):
            LLM(other, directory)


def test_a_torn_head_is_refused(pair: Pair, heads: dict[str, str], tmp_path: Path) -> None:
    for file in Path(heads["eagle3"]).iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    with pytest.raises(CheckpointError, match=tmp_path.name):
        LLM(pair.target, str(tmp_path))


def test_the_embedded_head_has_a_name() -> None:
    assert model_names(None, embedded.HEAD_NAME, None) == (embedded.NAME, embedded.HEAD_NAME)
    assert model_names(None, None, "eagle3") == (embedded.NAME, embedded.HEAD_NAME)
    assert model_names(None, None, "auto") == (embedded.NAME, embedded.HEAD_NAME)
    assert model_names(None, None, None) == (embedded.NAME, embedded.NAME)
    assert embedded.draft(embedded.HEAD_NAME) == str(embedded.HEAD)


def test_the_names_of_eagle_2() -> None:
    config = SpeculativeConfig(depth=5, top_k=10, total_tokens=60)
    assert (config.max_draft_len, config.tree_top_k, config.max_total_draft_tokens) == (5, 10, 59)
    for wrong in ({"depth": 5, "max_draft_len": 5}, {"total_tokens": 1}, {"total_tokens": -1}, {"top_k": True}):
        with pytest.raises(ConfigError):
            SpeculativeConfig(**wrong)


def test_longer_contexts_than_the_head_was_trained_for(tmp_path: Path) -> None:
    """Positions past what a head's file states are rotated on, not held at the last."""
    target = llama(tmp_path / "target", max_position_embeddings=256)
    shape = shape_of(target)
    head = EagleHead(eagle_config(shape), torch.float32)
    random_weights(head)
    write_head(head, tmp_path / "head", shape, target_name="tiny")
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 32}))
    llm = make_llm(target, str(tmp_path / "head"), max_seq_len=200)
    (drafter,) = (d for d in llm.engine.drafters.values() if d.namespace)
    cos, _ = drafter.guesser.head.rope_tables(torch.device("cpu"))  # type: ignore[attr-defined]
    assert len(cos) == 200
    assert len(torch.unique(cos[:, 0], dim=0)) == 200


def learn(reference: Reference, text: list[int], features: Tensor, levels: int = 3, steps: int = 90) -> None:
    """Lets a head memorise a text, its later guesses too: each level reads the outputs of the one before."""
    optimizer = torch.optim.Adam(reference.weights.values(), lr=4e-3)
    tokens, targets = text[1:-1], torch.tensor(text[2:])
    for weight in reference.weights.values():
        weight.requires_grad_()
    for _ in range(steps):
        hidden, loss = reference.fuse(features), torch.zeros(())
        for _ in range(levels):
            output = reference.run(tokens, hidden)
            last = reference.last(output)
            loss = loss + F.cross_entropy(F.linear(last, reference.output), targets)
            read = last if reference.config.norm_output or reference.config.version == 1 else output
            hidden = torch.cat([hidden[:1], read[:-1]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for weight in reference.weights.values():
        weight.requires_grad_(False)


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_that_has_learned_a_text_guesses_it(version: int, tmp_path: Path) -> None:
    """If any index between training and serving were off by one, it would not."""
    target = llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    plain = make_llm(target)
    prompt = prompts(2)[1]
    expected = alone(plain, prompt, params)
    text = prompt + expected.token_ids
    head = EagleHead(eagle_config(shape_of(target), version), torch.float32)
    EagleObjective.first_weights(head, model.lm_head.weight.detach(), torch.Generator().manual_seed(0))
    reference = Reference(
        head, weights_of(head), model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    )
    with torch.no_grad():
        states = model.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    taps = [states[-1]] if version == 1 else [states[tap + 1] for tap in head.config.taps]
    learn(reference, text, torch.cat(taps, dim=2)[0, :-2])
    head.load_state_dict(reference.weights, strict=False)
    pack(head)
    got = llm_with(target, head).generate(prompt, params)[0]
    assert said(got) == said(expected)
    assert got.speculation.acceptance_length > 2
