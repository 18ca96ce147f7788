"""What only a GPU can show: graphs say what eager steps say, in bfloat16 too, and the fused draw is the draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from adversaries import adversaries
from engine_checks import DEPTH, alone, inject, make_llm, prompts, said, save_pair, using
from head_checks import llm_with, make_eagle, make_medusa
from sametoken import LLM, SamplingParams, embedded
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import Draft, ancestors, chain_parents
from sametoken.speculation.sampling import RowSampling, Sampling, sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine or this build of torch has no CUDA")

VOCAB, BF16 = 90, torch.bfloat16
BFLOAT16 = {"device": "cuda", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair("llama-3", tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", [None, "none"])
def test_graphs_say_what_eager_steps_say(models: tuple[str, str], method: str | None, temperature: float) -> None:
    eager = make_llm(*models, method=method, **BFLOAT16)
    graphs = make_llm(*models, method=method, **BFLOAT16, cuda_graphs=True)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate((40, 9, 25))
    ]
    for _ in range(2):  # captured, then only replayed
        found = graphs.generate(prompts(3, VOCAB), params)
        assert [said(each) for each in found] == [said(each) for each in eager.generate(prompts(3, VOCAB), params)]
    assert graphs.engine.captured is not None
    assert len(graphs.engine.captured.graphs) >= 2  # of batches; a draft may end two requests in one step


TREE = {"tree_top_k": 3, "max_total_draft_tokens": 7}
CHOICES = ((0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 0))
KINDS: dict[str, Callable[..., LLM]] = {
    "draft tree": lambda models, **options: make_llm(*models, **TREE, **options),
    "trained head": lambda _, **options: make_llm(str(embedded.TARGET), str(embedded.HEAD), **options),
    "trained head tree": lambda _, **options: make_llm(str(embedded.TARGET), str(embedded.HEAD), **TREE, **options),
    "eagle1": lambda models, **options: llm_with(
        models[0], make_eagle(models[0], 1, dtype=BF16, device="cuda"), **options
    ),
    "medusa tree": lambda models, **options: llm_with(
        models[0], make_medusa(models[0], dtype=BF16, device="cuda", choices=CHOICES), **options
    ),
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_heads_and_trees_say_what_plain_steps_say(
    models: tuple[str, str], kind: str, temperature: float
) -> None:
    """Captured, then only replayed; every draft is made and verified in the graph."""
    graphs = KINDS[kind](models, **BFLOAT16, cuda_graphs=True)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate((40, 9, 25))
    ]
    expected = [alone(graphs, prompt, each) for prompt, each in zip(prompts(3, VOCAB), params, strict=True)]
    for _ in range(2):
        found = graphs.generate(prompts(3, VOCAB), params)
        assert [said(each) for each in found] == [said(each) for each in expected]
        assert all(each.speculation.drafted for each in found)
    assert graphs.engine.captured is not None
    assert len(graphs.engine.captured.graphs) >= 3  # batches of 4, 2 and 1


def test_no_drafter_changes_a_token_in_bfloat16(models: tuple[str, str]) -> None:
    llm = make_llm(*models, **BFLOAT16)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    prompt = prompts(3, VOCAB)[2]
    plain = alone(llm, prompt, params)
    drafters = adversaries([[*prompt, *plain.token_ids]], VOCAB, DEPTH, 7)
    inject(llm, drafters)
    together = llm.generate([prompt] * len(drafters), [using(params, name) for name in drafters])
    assert [each.token_ids for each in together] == [plain.token_ids] * len(drafters)


@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (1.0, 1.0), (0.7, 1.3), (0.0, 0.8)])
def test_the_fused_draw_is_the_draw(temperatures: tuple[float, float]) -> None:
    """Over a large vocabulary, bit for bit the noise of torch's own kernels: thousands of draws agree."""
    pytest.importorskip("triton")
    vocabulary, nodes = 128256, 200
    scores = torch.randn(2, nodes, vocabulary, device="cuda").bfloat16()
    rows = [
        RowSampling(SamplingParams(temperature=t), i, [1], vocabulary, device="cuda")
        for i, t in enumerate(temperatures)
    ]
    batch = Sampling.of(rows)
    parents = chain_parents(2, nodes, "cuda")
    asked = (scores, Draft(torch.zeros_like(parents), parents), ancestors(parents), torch.tensor([3, 9], device="cuda"))
    assert torch.equal(draw(*asked, batch), sample(*asked, batch))
