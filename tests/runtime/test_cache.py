"""The cache against plain Python: page addresses, tree commits, masks, and trees taken apart into chains."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sametoken.runtime.cache import KEY_BLOCK, SINK_PAGE, KVCache, PageTable, Span
from sametoken.runtime.chains import chains, is_chain
from sametoken.runtime.kv_format import FORMATS
from sametoken.speculation.draft import ancestors

PAGE = 4
PAGES = 40
PER_ROW = 10


def table_of(*owned: list[int]) -> PageTable:
    table = PageTable(len(owned), PAGES, PER_ROW, PAGE, "cpu")
    for row, pages in enumerate(owned):
        table.extend(row, pages)
    return table


def span_of(rows: list[int], starts: list[int], parents: list[list[int]], nodes: int | None = None) -> Span:
    ancestor_mask = ancestors(torch.tensor(parents))
    count = ancestor_mask.shape[1]
    return Span(torch.tensor(rows), rows, torch.tensor(starts), ancestor_mask, nodes or count, max(starts) + count)


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


trees = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(-1), *(st.integers(0, node - 1) for node in range(1, n)))
).map(list)  # fmt: skip


def test_addresses() -> None:
    table = table_of([3, 7, 1], [9])
    index = torch.tensor([[0, 3, 4, 11], [0, 3, 4, 39]])
    assert table.slots(torch.tensor([0, 1]), index).tolist() == [
        [3 * PAGE, 3 * PAGE + 3, 7 * PAGE, PAGE + 3],
        [9 * PAGE, 9 * PAGE + 3, SINK_PAGE, SINK_PAGE + 3],
    ]
    # Past the end of the table there is only the sink, never another row's page.
    assert int(table.slots(torch.tensor([1]), torch.tensor([[PER_ROW * PAGE + 5]]))) < PAGE


def test_pages_come_and_go() -> None:
    table = table_of([5, 6], [])
    assert table.first_slot(0, 8) == 5 * PAGE
    table.extend(0, [8])
    assert table.first_slot(0, 8) is None
    assert table.first_slot(1, 8) is None
    assert list(table.owned(0)) == [5, 6, 8]
    assert table.clear(0) == [5, 6, 8]
    assert not table.table.any()
    table.extend(0, [PAGES - 1])
    assert table.first_slot(0, PAGE) == (PAGES - 1) * PAGE
    assert table.first_slot(0, PAGE + 1) is None, "a view may not run off the end of the pool"


@given(trees)
def test_chains_are_the_paths_to_all_leaves(parents: list[int]) -> None:
    got = chains(ancestors(torch.tensor([parents, parents])))
    leaves = [node for node in range(len(parents)) if node not in parents]
    assert got.rows.tolist() == [0] * len(leaves) + [1] * len(leaves)
    for path, leaf in zip(got.path.tolist(), leaves * 2, strict=True):
        expected = path_to(parents, leaf)
        assert path == expected + [leaf] * (len(path) - len(expected))
    width = got.path.shape[1]
    for token, place in enumerate(got.place.tolist()):
        row, node = divmod(token, len(parents))
        assert got.source[place] == token
        assert got.rows[place // width] == row
        assert place % width == len(path_to(parents, node)) - 1, "a node stands at its own depth"
    assert is_chain(ancestors(torch.tensor([parents]))) == (len(leaves) == 1)


def filled(table: PageTable) -> KVCache:
    """A cache whose every slot holds its own number."""
    cache = KVCache(2, 1, 1, table, torch.float32, "cpu")
    for layer in range(2):
        numbers = torch.arange(PAGES * PAGE, dtype=torch.float32) + 1000 * layer
        cache.keys[layer, :, 0, 0] = numbers
        cache.values[layer, :, 0, 0] = -numbers
    return cache


def contents(cache: KVCache, row: int, length: int) -> Tensor:
    """[layers, 2, length] keys and values of a row in its own order."""
    slots = cache.table.slots(torch.tensor([row]), torch.arange(length).unsqueeze(0)).flatten()
    return torch.stack([cache.keys[:, slots, 0, 0], cache.values[:, slots, 0, 0]], dim=1)


@given(trees, st.integers(0, 9), st.randoms(use_true_random=False))
def test_commit_moves_the_path_to_the_front(parents: list[int], start: int, chance: random.Random) -> None:
    cache = filled(table_of([11, 3, 4, 30, 2, 9, 21], [12, 13, 14, 15, 16, 17, 18]))
    before = [contents(cache, row, 28) for row in range(2)]
    starts = [start, 5]
    paths = [path_to(parents, chance.randrange(len(parents))) for _ in starts]
    longest = max(map(len, paths))
    padded = torch.tensor([path + [path[-1]] * (longest - len(path)) for path in paths])
    cache.commit(torch.tensor([0, 1]), torch.tensor(starts), padded)
    for row, (at, path) in enumerate(zip(starts, paths, strict=True)):
        after = contents(cache, row, at + len(path))
        expected = torch.cat([before[row][..., :at], before[row][..., [at + node for node in path]]], dim=-1)
        assert torch.equal(after, expected)
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
    untouched[cache.table.slots(torch.tensor([0, 1]), torch.arange(28).expand(2, -1)).flatten()] = False
    assert torch.equal(cache.keys[0, untouched, 0, 0], torch.arange(PAGES * PAGE)[untouched].float())


def test_committing_a_chain_moves_nothing() -> None:
    cache = filled(table_of([5, 6, 7]))
    before = cache.keys.clone()
    cache.commit(torch.tensor([0]), torch.tensor([3]), torch.tensor([[0, 1, 2, 2, 2]]))
    assert torch.equal(cache.keys, before)


@settings(deadline=None)
@given(trees, st.integers(0, 20), st.sampled_from([None, 1, 3, 9]), st.booleans(), st.booleans())
def test_who_sees_whom(parents: list[int], start: int, window: int | None, chunked: bool, partly: bool) -> None:
    """Which slots every node attends to, through whatever view the cache makes of a tree."""
    table = table_of([11, 3, 4, 30, 2, 9, 21, 8], [12, 13, 14, 15, 16, 17, 18, 19])
    cache = filled(table)
    nodes = max(1, len(parents) // 2) if partly else len(parents)
    starts = [start, 2]
    view = cache.view([span_of([0, 1], starts, [parents, parents], nodes)])
    segment = view.segments[0]
    keys, values = cache.read(1, segment)
    assert keys.shape == (segment.batch, 1, segment.length, 1)
    assert segment.length % KEY_BLOCK == 0
    assert torch.equal(keys, -values)
    mask = segment.mask(window, chunked, 1, segment.nodes)[:, 0]
    places = segment.chains.place.tolist() if segment.chains else range(segment.tokens)
    first = len(parents) - nodes
    for token, place in enumerate(places):
        row, node = divmod(token, nodes)
        path = path_to(parents, first + node)
        position = starts[row] + len(path) - 1
        assert view.positions[token] == position
        index = [*range(starts[row]), *(starts[row] + n for n in path)]
        if window:
            index = index[position - position % window if chunked else max(0, len(index) - window) :]
        expected = table.slots(torch.tensor([row]), torch.tensor([index])).flatten() + 1000
        line, column = divmod(place, segment.nodes)
        seen = mask[line, column] == 0
        assert mask[line, column][~seen].eq(float("-inf")).all()
        assert keys[line, 0, seen, 0].sort().values.tolist() == sorted(expected.tolist())
        if segment.chains:
            assert keys[line, 0, seen, 0].tolist() == expected.tolist(), "a path lies side by side, in order"


@pytest.mark.parametrize("form", ["auto", "int8"])
def test_keys_that_are_values_move_once(form: str) -> None:
    """A path that overlaps the places it moves to."""
    cache = KVCache(2, 1, 4, table_of([2, 1, 3]), torch.float32, "cpu", FORMATS[form], shared_values=True)
    other = KVCache(2, 1, 4, table_of([2, 1, 3]), torch.float32, "cpu", FORMATS[form])
    stored, path = torch.randn(6, 1, 4), torch.tensor([[0, 2, 3, 5]])
    read = []
    for each in (cache, other):
        view = each.view([span_of([0], [0], [list(range(-1, 5))])])
        each.write(1, view.slots, stored, stored)
        each.commit(torch.tensor([0]), torch.tensor([0]), path)
        read.append(each.read(1, view.segments[0]))
    assert torch.equal(read[0][0], read[1][0])
    assert torch.equal(read[0][1], read[1][1])
    assert cache.values is cache.keys


@pytest.mark.parametrize("owned", [[1, 2, 3], [3, 1, 2], [PAGES - 3, PAGES - 2, PAGES - 1]])
def test_a_lone_row_reads_the_same_from_any_pages(owned: list[int]) -> None:
    table = table_of(owned)
    cache = KVCache(1, 2, 3, table, torch.float32, "cpu")
    stored = torch.randn(10, 2, 3)
    view = cache.view([span_of([0], [0], [list(range(-1, 9))])])
    cache.write(0, view.slots, stored, -stored)
    keys, values = cache.read(0, view.segments[0])
    assert torch.equal(keys[0, :, :10], stored.transpose(0, 1))
    assert torch.equal(values[0, :, :10], -stored.transpose(0, 1))
    assert keys.isfinite().all()
