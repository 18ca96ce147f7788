"""Every family against transformers: equal logits and greedy text, prefilled whole, in chunks and as a tree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tiny_models
from matrix import mark
from sametoken.checkpoint.load import load_decoder
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import ancestors

PROMPT = 24
GREEDY = 64
CHUNKS = (7, 1, 10, 6)
NODES = 14
DEVICE = tiny_models.DEVICE
TOLERANCE = 1e-4
PAGE = 16
# Page numbers out of order, so that the keys of a row do not lie side by side.
SCATTERED = (9, 2, 7, 1, 4, 8, 3, 6)


class Sequence:
    """One row of a cache and how many of its tokens are committed: the least that can run a decoder."""

    def __init__(self, decoder: Decoder, pages: tuple[int, ...] = SCATTERED) -> None:
        self.decoder, self.length = decoder, 0
        self.table = PageTable(1, 10, len(pages), PAGE, DEVICE)
        self.table.extend(0, pages)
        self.cache = KVCache.of(decoder.config, self.table, torch.float32, DEVICE)

    def forward(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Logits [N, V] after each node of a tree that follows the committed tokens; commits nothing."""
        # A decoder on CPU wants two rows or more: a padding node follows the last one.
        tokens, parents = [*tokens, -1], [*parents, len(tokens) - 1]
        ancestor_mask = ancestors(torch.tensor([parents], device=DEVICE))
        starts = torch.tensor([self.length], device=DEVICE)
        span = Span(torch.zeros_like(starts), (0,), starts, ancestor_mask, len(tokens), self.length + len(tokens))
        hidden = self.decoder(torch.tensor(tokens, device=DEVICE), self.cache, self.cache.view([span]))
        return self.decoder.logits(hidden.last)[:-1]

    def commit(self, path: list[int]) -> None:
        self.cache.commit(*(torch.tensor(x, device=DEVICE) for x in ([0], [self.length], [path])))
        self.length += len(path)

    def extend(self, tokens: list[int]) -> Tensor:
        """Commit a chain and return its logits."""
        logits = self.forward(tokens, list(range(-1, len(tokens) - 1)))
        self.commit(list(range(len(tokens))))
        return logits

    def greedy(self, last: Tensor, count: int) -> list[int]:
        """`count` greedy tokens, given the logits after the committed ones."""
        out = [int(last.argmax())]
        while len(out) < count:
            out.append(int(self.extend(out[-1:])[0].argmax()))
        return out


class Pair:
    """A transformers model, our decoder of its files, a prompt, and what transformers says to it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.model: PreTrainedModel = tiny_models.save(name, directory, max_shard_size="100KB")
        limit = tiny_models.FAMILIES[name].max_seq_len
        self.decoder = load_decoder(directory, torch.float32, DEVICE, max_seq_len=limit)
        generator = torch.Generator().manual_seed(7)
        self.prompt: list[int] = torch.randint(tiny_models.VOCAB, (PROMPT,), generator=generator).tolist()
        self.logits = self.expected([self.prompt])[0]
        self.text = self._generate()

    @torch.inference_mode()
    def expected(self, texts: list[list[int]]) -> list[Tensor]:
        """transformers' logits [len, V] of each text. Padding stands to the right, where causal attention is blind."""
        longest = max(len(text) for text in texts)
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        return [row[: len(text)] for row, text in zip(self.model(ids).logits, texts, strict=True)]

    @torch.inference_mode()
    def _generate(self) -> list[int]:
        ids = torch.tensor([self.prompt])
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": GREEDY, "pad_token_id": 0}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, PROMPT:].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Pair(request.param, tmp_path_factory.mktemp(request.param))
    torch.set_num_threads(threads)


# Windows, latent and chunked attention, sinks, experts; `make test-thorough` cuts the prompts of all families.
FEW = ("llama-3", "gemma-3", "deepseek-v3", "gpt-oss", "llama-4", "phi-3-long", "olmo-3")
IN_PARTS = pytest.mark.parametrize(
    "pair",
    [pytest.param(name, marks=mark(name in FEW)) for name in tiny_models.FAMILIES],
    indirect=True,
    scope="module",
)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=TOLERANCE)


def random_tree(seed: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree of NODES nodes."""
    chance = random.Random(seed)
    parents = [-1, *(chance.randrange(n) for n in range(1, NODES))]
    return [chance.randrange(tiny_models.VOCAB) for _ in parents], parents


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.cover
@pytest.mark.parametrize("pages", [SCATTERED, tuple(range(1, 9))], ids=["scattered", "side-by-side"])
def test_prefill_whole(pair: Pair, pages: tuple[int, ...]) -> None:
    sequence = Sequence(pair.decoder, pages)
    logits = sequence.extend(pair.prompt)
    close(logits, pair.logits)
    assert sequence.greedy(logits[-1], GREEDY) == pair.text


@IN_PARTS
def test_prefill_in_chunks(pair: Pair) -> None:
    sequence = Sequence(pair.decoder)
    assert sum(CHUNKS) == PROMPT
    pieces = [sequence.extend(list(chunk)) for chunk in torch.tensor(pair.prompt).split(CHUNKS)]
    close(torch.cat(pieces), pair.logits)
    assert sequence.greedy(pieces[-1][-1], GREEDY) == pair.text


def test_every_node_of_a_tree(pair: Pair) -> None:
    sequence = Sequence(pair.decoder)
    sequence.extend(pair.prompt)
    tokens, parents = random_tree(seed=3)
    logits = sequence.forward(tokens, parents)
    paths = [path_to(node, parents) for node in range(NODES)]
    expected = pair.expected([pair.prompt + [tokens[n] for n in path] for path in paths])
    close(logits, torch.stack([text[-1] for text in expected]))

    deepest = max(paths, key=len)
    assert deepest != list(range(len(deepest))), "the path must move when it is committed"
    sequence.commit(deepest)
    text = pair.prompt + [tokens[n] for n in deepest] + pair.text[:5]
    close(sequence.extend(pair.text[:5]), pair.expected([text])[0][-5:])


@IN_PARTS
def test_prompt_as_a_tree(pair: Pair) -> None:
    """The prompt is one branch among wrong ones; greedy text after it is unchanged."""
    wrong = [(token + 1) % tiny_models.VOCAB for token in pair.prompt]
    tokens = [token for both in zip(pair.prompt, wrong, strict=True) for token in both]
    parents = [2 * (n // 2 - 1) if n > 1 else -1 for n in range(2 * PROMPT)]
    parents[1] = 0  # the root has no sibling
    sequence = Sequence(pair.decoder)
    logits = sequence.forward(tokens, parents)[::2]
    close(logits, pair.logits)
    sequence.commit(list(range(0, 2 * PROMPT, 2)))
    assert sequence.greedy(logits[-1], GREEDY) == pair.text


def test_logits_tell_models_apart(pair: Pair) -> None:
    """The tolerance means something: the best two tokens are much farther apart, and the text is not one token."""
    best = pair.logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).median()) > 1000 * TOLERANCE
    assert len(set(pair.text)) > 3
