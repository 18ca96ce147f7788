"""Trees and their verification against walks over the parents: any tree, padding, duplicate siblings."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.speculation.draft import PADDING, Draft, ancestors, chain_parents, depth
from sametoken.speculation.verify import _search, _walk, verify


def walk(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@st.composite
def batches(draw: st.DrawFn, tokens: int = 3) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, parents and draws of up to 4 rows; few different tokens, so siblings repeat and draws often match."""
    rows, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    parents = [[-1] + [draw(st.integers(0, n - 1)) for n in range(1, nodes)] for _ in range(rows)]
    real = [draw(st.integers(1, nodes)) for _ in range(rows)]
    token = st.integers(0, tokens - 1)
    guesses = [[draw(token) if n < size else PADDING for n in range(nodes)] for size in real]
    draws = [[draw(token) for _ in range(nodes)] for _ in range(rows)]
    return guesses, parents, draws


def reference(tokens: list[int], parents: list[int], drawn: list[int]) -> tuple[list[int], int]:
    """The longest path of matching nodes, the lowest last node among equals, and the draw after it."""
    paths = [walk(parents, node) for node in range(len(tokens))]
    right = [p for p in paths if all(tokens[b] == drawn[a] for a, b in pairwise(p))]
    best = max(right, key=lambda p: (len(p), -p[-1]))
    return best, drawn[best[-1]]


@settings(max_examples=300, deadline=None)
@given(batches())
def test_ancestors_and_depth_are_the_walk_to_the_root(batch: tuple[list[list[int]], ...]) -> None:
    _, parents, _ = batch
    ancestor_mask = ancestors(torch.tensor(parents))
    levels = depth(ancestor_mask)
    for b, row in enumerate(parents):
        for n in range(len(row)):
            path = walk(row, n)
            assert ancestor_mask[b, n].nonzero().flatten().tolist() == path
            assert levels[b, n] == len(path) - 1


@settings(max_examples=500, deadline=None)
@given(batches())
def test_verdict_is_the_longest_matching_path(batch: tuple[list[list[int]], ...]) -> None:
    tokens, parents, drawn = batch
    draft = Draft(torch.tensor(tokens), torch.tensor(parents))
    verdict = verify(draft, ancestors(draft.parents), torch.tensor(drawn))
    for b in range(len(tokens)):
        path, bonus = reference(tokens[b], parents[b], drawn[b])
        assert verdict.length[b] == len(path) - 1
        assert verdict.path[b].tolist() == path + [path[-1]] * (len(tokens[b]) - len(path))
        assert verdict.bonus[b] == bonus


@settings(max_examples=300, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_emitted_tokens_do_not_depend_on_the_tree(batch: tuple[list[list[int]], ...], random: object) -> None:
    """Where draws are a function of the path's tokens, the emitted tokens are the chain of draws from the root."""
    tokens, parents, _ = batch
    memory: dict[tuple[int, ...], int] = {}

    def target(context: tuple[int, ...]) -> int:
        return memory.setdefault(context, random.randrange(3))  # type: ignore[attr-defined]

    drawn = [
        [target(tuple(t[m] for m in walk(p, n))) for n in range(len(t))] for t, p in zip(tokens, parents, strict=True)
    ]
    draft = Draft(torch.tensor(tokens), torch.tensor(parents))
    verdict = verify(draft, ancestors(draft.parents), torch.tensor(drawn))
    for b, row in enumerate(tokens):
        accepted = [row[n] for n in verdict.path[b, 1 : 1 + int(verdict.length[b])].tolist()]
        plain = [row[0]]
        for _ in range(len(accepted) + 1):
            plain.append(target(tuple(plain)))
        assert [row[0], *accepted, int(verdict.bonus[b])] == plain


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40))
def test_a_chain_is_accepted_up_to_its_first_error(nodes: int, wrong: int) -> None:
    tokens = torch.arange(nodes).unsqueeze(0)
    drawn = tokens + 1
    if wrong < nodes:
        drawn[0, wrong] = 999
    verdict = verify(Draft(tokens, chain_parents(1, nodes)), ancestors(chain_parents(1, nodes)), drawn)
    assert verdict.length.item() == min(wrong, nodes - 1)
    assert verdict.bonus.item() == (999 if wrong < nodes else nodes)


def test_a_tree_of_padding_yields_the_plain_step() -> None:
    tokens = torch.full((2, 5), PADDING)
    tokens[:, 0] = 4
    drawn = torch.tensor([[7, 4, 4, 4, 4], [8, 4, 4, 4, 4]])
    verdict = verify(Draft(tokens, chain_parents(2, 5)), ancestors(chain_parents(2, 5)), drawn)
    assert verdict.length.tolist() == [0, 0]
    assert verdict.path.tolist() == [[0] * 5, [0] * 5]
    assert verdict.bonus.tolist() == [7, 8]


@settings(max_examples=300, deadline=None)
@given(batches())
def test_the_walk_and_the_search_agree(batch: tuple[list[list[int]], ...]) -> None:
    tokens, parents, drawn = map(torch.tensor, batch)
    draft = Draft(tokens, parents)
    for walked, found in zip(_walk(draft, drawn), _search(draft, ancestors(parents), drawn), strict=True):
        assert torch.equal(walked, found)
