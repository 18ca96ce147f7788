"""The union of trees by path, against sets of paths."""

from __future__ import annotations

import random
import time

import hypothesis.strategies as st
from hypothesis import given, settings

from sametoken.speculation.draft import union

Tree = tuple[list[int], list[int]]
Path = tuple[int, ...]


def tree(luck: random.Random, nodes: int, vocab: int) -> Tree:
    """A random tree after a root: few tokens, so that paths are shared and siblings repeat."""
    tokens, parents = list[int](), list[int]()
    for node in range(1, nodes):
        tokens.append(luck.randrange(vocab))
        parents.append(luck.choice([node - 1, luck.randrange(node)]))
    return tokens, parents


def paths(found: Tree) -> list[Path]:
    """The path to every node, the root's empty."""
    said: list[Path] = [()]
    for token, parent in zip(*found, strict=True):
        said.append((*said[parent], token))
    return said


@given(seed=st.integers(0, 10**6), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), vocab=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_it_has_every_path_once_and_knows_who_said_it(seed: int, sizes: list[int], vocab: int) -> None:
    luck = random.Random(seed)
    trees = [tree(luck, size, vocab) for size in sizes]
    found = union(trees, most=99)
    assert all(0 <= parent < node for node, parent in enumerate(found.parents, 1))
    joint, parts = paths((found.tokens, found.parents)), [set(paths(each)) for each in trees]
    assert len(joint) == len(set(joint)) == 1 + len(found.tokens)
    assert set(joint) == set().union(*parts)
    for path, sayers in zip(joint, found.said, strict=True):
        assert [bool(sayers >> part & 1) for part in range(len(trees))] == [path in part for part in parts]
    assert found.longest == [max(map(len, part)) for part in parts]
    node = luck.randrange(len(joint))
    way = [joint.index(joint[node][:depth]) for depth in range(len(joint[node]) + 1)]
    told = found.parts([str(part) for part in range(len(parts))], way)
    for part, known in enumerate(parts):
        accepted = max(n for n in range(len(joint[node]) + 1) if joint[node][:n] in known)
        assert told[str(part)] == (found.longest[part], accepted)


@given(seed=st.integers(0, 10**6), most=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_it_keeps_to_the_room_that_there_is(seed: int, most: int) -> None:
    luck = random.Random(seed)
    trees = [tree(luck, 7, 3) for _ in range(3)]
    found, whole = union(trees, most), union(trees, 99)
    assert len(found.tokens) == min(most, len(whole.tokens))
    assert set(paths((found.tokens, found.parents))) <= set(paths((whole.tokens, whole.parents)))
    assert all(found.said)


def test_64_rows_take_little_of_a_step() -> None:
    """0.7 ms of processor time on an idle machine; twice as much beside a busy neighbour on the same core."""
    luck = random.Random(0)
    rows = [[tree(luck, 9, 100), tree(luck, 9, 100)] for _ in range(64)]
    seconds = []
    for _ in range(20):
        begin = time.thread_time()
        for trees in rows:
            union(trees, 16)
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 0.003, f"{1e3 * min(seconds):.2f} ms"
