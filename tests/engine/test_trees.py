"""Trees of a step stand in the forward by size, and no row computes more nodes than its own tree has."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine_checks import make_llm, prompts, save_pair
from sametoken import SamplingParams
from sametoken.drafters.padded import Guess, guesses_of, padded
from sametoken.engine.plan import Plan
from sametoken.engine.report import Done, Proposal
from sametoken.engine.runner import groups
from sametoken.options.sampling import RequestSpeculation
from sametoken.speculation.draft import Draft, ancestors


@st.composite
def guesses(draw: st.DrawFn) -> Guess:
    parents = [draw(st.integers(0, node)) for node in range(draw(st.integers(0, 5)))]
    return Guess([draw(st.integers(0, 9)) for _ in parents], parents)


@given(rows=st.lists(guesses(), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_groups_hold_every_node_once_and_no_padding(rows: list[Guess]) -> None:
    pending = range(100, 100 + len(rows))
    draft = padded(pending, rows)
    counts, device = [1 + len(row.tokens) for row in rows], torch.device("cpu")
    assert guesses_of(draft) == rows
    found = groups(pending, rows, device, ragged=True)
    assert [trees.nodes for trees in found] == sorted(set(counts))
    assert found[-1].end == sum(counts)
    assert sorted(place for trees in found for place in trees.places) == list(range(len(rows)))
    flat = torch.cat([trees.draft.tokens.flatten() for trees in found])
    for trees in found:
        assert torch.equal(trees.of(flat), trees.draft.tokens)
        for at, place in enumerate(trees.places):
            assert trees.draft.tokens[at].tolist() == [100 + place, *rows[place].tokens]
            assert trees.draft.parents[at].tolist() == [-1, *rows[place].parents]
            whole = Draft(draft.tokens[[place], : trees.nodes], draft.parents[[place], : trees.nodes])
            assert torch.equal(trees.ancestor_mask[at], ancestors(whole.parents)[0])
    [rectangle] = groups(pending, rows, device, ragged=False)
    assert torch.equal(rectangle.draft.tokens, draft.tokens)
    assert torch.equal(rectangle.draft.parents, draft.parents)


@pytest.mark.usefixtures("one_thread")
def test_a_plain_row_beside_long_drafts_is_one_token_of_the_forward(tmp_path_factory: pytest.TempPathFactory) -> None:
    llm = make_llm(*save_pair("llama-3", tmp_path_factory.mktemp("trees")), adaptive=False)
    counted, run = list[Done](), llm.engine.runner.run

    def counting(plan: Plan, proposal: Proposal) -> Done:
        counted.append(run(plan, proposal))
        return counted[-1]

    llm.engine.runner.run = counting
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, speculative=RequestSpeculation(enabled=False))
    drafted = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate(prompts(3), [plain, drafted, plain])
    wide = [done for done in counted if len(done.plan.decode) == 3 and done.plan.decode[1].limit]
    assert wide
    for done in wide:
        sizes = [1 + len(guess.tokens) for guess in done.proposal.guesses]
        assert done.tokens == sum(sizes) < len(sizes) * max(sizes)
