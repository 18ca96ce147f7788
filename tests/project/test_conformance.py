"""The parts of the comparisons with peers that decide what a figure is, and what the written page may say."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from conformance import results
from conformance.environments import ENVIRONMENTS, TORCH
from conformance.our_heads import random_head, variants
from conformance.results import Comparison, Result
from conformance.unroll import Tables, chain, unrolled

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.model.config import ModelConfig

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
VOCAB, HIDDEN, POSITIONS = 300, 32, 14
TARGET = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }
)  # fmt: skip


@pytest.fixture(params=["reduced vocabulary", "two layers", "EAGLE 3.1", "sliding window"])
def head(request: pytest.FixtureRequest) -> EagleHead:
    return random_head(variants(TARGET)[request.param], seed=3)


def test_unrolled_steps_are_a_causal_pass_over_what_each_chain_read(head: EagleHead) -> None:
    """A chain's step k is the last row of one causal pass over its certain slots and its own recycled ones."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (POSITIONS + 4,), generator=generator)
    features = torch.randn(POSITIONS, head.config.fused_size, generator=generator)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    with torch.no_grad():
        steps = unrolled(head, features, tokens, Tables(embed, embed), 3)
        for first in (0, 5, POSITIONS - 1):
            hidden = head.fuse(features[: first + 1])
            for step in range(3):
                rows = first + 1 + step
                output = head(embed[tokens[1 : rows + 1]], hidden, head.rotation(torch.arange(rows)), causal)
                assert torch.allclose(head.logits(output)[-1], steps[step][first], atol=1e-4)
                hidden = torch.cat([hidden, head.recycle(output)[-1:]])


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, window: int | None) -> torch.Tensor:
    age = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (age >= 0) & (age < (window or len(q)))
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return mixed[0].transpose(0, 1).reshape(len(age), -1)


def test_a_chain_reads_its_own_guesses(head: EagleHead) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (POSITIONS + 1,), generator=generator)
    features = torch.randn(POSITIONS, head.config.fused_size, generator=generator)
    tables = Tables(*torch.randn(2, VOCAB, HIDDEN, generator=generator))
    with torch.no_grad():
        guesses = chain(head, features, tokens, tables, 3)
        steps = unrolled(head, features, torch.cat([tokens, torch.tensor(guesses)]), tables, 3)
    assert guesses == [int(head.draft_ids[logits[POSITIONS - 1].argmax()]) for logits in steps]
    assert set(guesses) <= set(head.draft_ids.tolist())


def test_every_variant_differs_from_the_plain_head() -> None:
    """A variant that computed the same as another would prove nothing about its own part."""
    configs: dict[str, EagleConfig] = variants(TARGET)
    assert len(set(configs.values())) == len(configs)
    plain = configs["full vocabulary"]
    for config in configs.values():
        assert config.layers.rope.theta != TARGET.rope.theta  # the draft's own rotation, which exports must carry
        assert config is plain or replace(config, draft_vocab_size=plain.draft_vocab_size) != config


def test_differences_are_relative_and_nothing_hides_in_them() -> None:
    theirs = torch.tensor([[0.0, 2.0, 4.0]])
    assert results.distance([theirs + 0.5], [theirs]) == pytest.approx(0.5 / theirs.std().item())
    assert results.distance([theirs * math.nan], [theirs]) == math.inf
    with pytest.raises(ValueError, match=r"\(1, 2\) here and \(1, 3\) there"):
        results.distance([theirs[:, :2]], [theirs])
    with pytest.raises(ValueError, match="longer"):
        results.distance([], [theirs])


@pytest.mark.parametrize(("apart", "outcome"), [(0.0, "agrees"), (10 * results.LOGITS, "differs")])
def test_the_limit_decides(apart: float, outcome: str) -> None:
    theirs = torch.tensor([[-1.0, 0.0, 1.0]])
    assert results.compare_logits("peer", "head", "logits", [theirs + apart], [theirs]).outcome == outcome


def test_a_cell_of_the_page_stays_a_cell() -> None:
    found = Comparison([Result("peer", "head", "logits", "a|b\nc", "agrees")], {"torch": "2"}, 90.0)
    page = results.markdown({"peer": found})
    assert "| head | logits | a\\|b c | agrees |" in page
    assert "torch 2." in page


def test_results_of_other_peers_are_kept(tmp_path: Path) -> None:
    for peer, outcome in (("one", "differs"), ("two", "agrees"), ("one", "agrees")):
        found = Comparison([Result(peer, "head", "logits", "1e-6", outcome)], {"torch": "2"}, 1.0)
        results.keep(peer, found, tmp_path, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.count("| agrees |") == 2
    assert "| differs |" not in page


def test_an_environment_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    """pip would fail here: the interpreter of this environment does not exist."""
    environment = ENVIRONMENTS["speculators"]
    wanted = [TORCH, *environment.packages, *(f"-{name}" for name in environment.unwanted)]
    (tmp_path / "speculators").mkdir()
    (tmp_path / "speculators" / "installed.txt").write_text("\n".join(wanted) + "\n")
    assert environment.python(tmp_path) == tmp_path / "speculators" / "bin" / "python"


def test_the_page_in_the_docs_has_no_difference() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    outcomes = [row.rstrip(" |").rsplit("| ", 1)[1] for row in rows if not row.startswith("| head |")]
    assert set(outcomes) == {"agrees", "as documented"}
