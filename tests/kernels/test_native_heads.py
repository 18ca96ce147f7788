"""EAGLE heads and chains of guesses in the compiled kernels, against the torch modules and the rule of sampling."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drafter_checks import drafted
from native_checks import kernels, threads
from sametoken.control.worth import Time, Worth
from sametoken.drafters.rows import GrowingDrafter
from sametoken.heads.draft_model.drafts import DraftModelDrafter
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafter import EagleDrafter, NativeEagle
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.modules import pack
from sametoken.kernels.cpu.library import Library
from sametoken.model.compiled_guesses import Committed, Guesses
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder, attend_in
from sametoken.model.formats.names import FORMATS
from sametoken.model.linear import Embedding, Linear
from sametoken.model.rope_config import RopeConfig
from sametoken.options.sampling import SamplingParams
from sametoken.runtime.cache import KVCache, PageTable, Span, View
from sametoken.speculation.draft import PADDING, Draft, ancestors, chain_parents
from sametoken.speculation.rows import RowSampling, Sampling
from sametoken.speculation.sampling import rank, sample

__all__ = ["kernels", "threads"]  # fixtures

# More threads are for chains, which go through all that heads do; `test_native.py` has them for the rest.
one_thread = pytest.mark.parametrize("threads", [1], indirect=True)
VOCAB, DRAFT_VOCAB, HIDDEN = 1000, 301, 64
TARGET = ModelConfig(
    architecture="LlamaForCausalLM", family="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=112,
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, norm_eps=1e-5, activation="silu",
    tie_word_embeddings=True, sliding_windows=(None, None), max_position=256, eos_token_ids=(2,), bos_token_id=1,
    rope=RopeConfig("default", 10000.0, 32, 256, 256), dtype="bfloat16",
)  # fmt: skip
ONE = replace(TARGET, num_layers=1, sliding_windows=(None,))
TWO = replace(TARGET, sliding_windows=(21, None), qkv_bias=True, qk_norm=True, out_bias=True, activation="gelu")
EAGLE_1 = EagleConfig(ONE, 1, (), HIDDEN, VOCAB, own_head=False)
EAGLE_3 = EagleConfig(ONE, 3, (0, 1), HIDDEN, DRAFT_VOCAB)
HEADS = {
    "1": EAGLE_1,
    "1 with norms and a bias": replace(EAGLE_1, input_norm=True, fc_bias=True, last_norm=True),
    "1 bare, two layers": replace(EAGLE_1, layers=TWO, last_norm=False, own_embed=True, own_head=True),
    "1 with norms of both parts": replace(EAGLE_1, input_norm=True, joined_norms=True),
    "1 that reads the state first": replace(EAGLE_1, input_norm=True, joined_norms=True, hidden_first=True),
    "3": EAGLE_3,
    "3 normed residual": replace(EAGLE_3, norm_before_residual=True, norm_before_fc=True),
    "3.1": replace(EAGLE_3, fc_norm=True, norm_output=True),
    "3 two layers": replace(EAGLE_3, layers=TWO, draft_vocab_size=VOCAB),
    "3 of another width": replace(
        EAGLE_3, layers=replace(ONE, hidden_size=96), own_embed=True, fc_norm=True, norm_before_fc=True
    ),
}  # fmt: skip


@pytest.fixture(params=HEADS)
def config(request: pytest.FixtureRequest) -> EagleConfig:
    return HEADS[request.param]


def fill(module: nn.Module, dtype: torch.dtype) -> None:
    """The same random weights, bfloat16 numbers, in every dtype."""
    for seed, parameter in enumerate(module.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        values = 1 + 0.2 * values if parameter.dim() == 1 else 0.15 * values
        parameter.data = values.to(torch.bfloat16).to(dtype)


def decoder_of(dtype: torch.dtype, packed: bool, config: ModelConfig = TARGET) -> Decoder:
    decoder = Decoder(config, dtype)
    fill(decoder, dtype)
    for module in decoder.modules():
        if packed and isinstance(module, Linear | Embedding):
            module.pack()
    return decoder


def head_of(config: EagleConfig, dtype: torch.dtype, packed: bool, format: str | None = None) -> EagleHead:
    head = EagleHead(config, dtype, None if format is None else FORMATS[format])
    fill(head, dtype)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: config.draft_vocab_size].sort().values
    head.d2t = kept - torch.arange(config.draft_vocab_size)
    if packed:
        pack(head)
    return head


def native_of(config: EagleConfig, format: str | None = None) -> NativeEagle:
    found = NativeEagle.of(head_of(config, torch.bfloat16, True, format), decoder_of(torch.bfloat16, True))
    assert found is not None
    return found


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def cache_of(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, rows: int = 4) -> KVCache:
    table = PageTable(rows, rows * 12 + 1, 12, 16, "cpu")
    order = torch.randperm(rows * 12, generator=torch.Generator().manual_seed(3)) + 1
    for row in range(rows):
        table.extend(row, order[row * 12 : (row + 1) * 12].tolist())
    return KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, dtype, "cpu")


def span_of(rows: list[int], starts: list[int], parents: Tensor, nodes: int | None = None) -> Span:
    total = parents.shape[1]
    at = torch.tensor(rows), rows, torch.tensor(starts)
    return Span(*at, ancestors(parents), nodes or total, max(starts) + total)


def head_width(config: EagleConfig) -> int:
    """Width of the features that the head reads."""
    return (len(config.taps) or 1) * config.target_hidden_size


class Torch:
    """A head and its target in torch, as `NativeEagle` is called."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("linear", "compiled"):
                patch.setattr(f"sametoken.model.{name}.library", lambda: None)
            self.head, self.target = head_of(config, dtype, False), decoder_of(dtype, False)

    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features.to(self.head.dtype))

    def __call__(self, tokens: Tensor, hidden: Tensor, cache: KVCache, view: View) -> Tensor:
        embed = self.head.embed or self.target.embed
        return self.head(embed(tokens.clamp(min=0)), hidden, self.head.rotation(view.positions), attend_in(cache, view))

    def logits(self, output: Tensor) -> Tensor:
        return self.head.logits(output) if self.head.head else self.target.embed.project(self.head.normed(output))


def read(model: Any, config: EagleConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs and logits of two texts, read in pieces, then of a tree on one of them."""
    cache, found = cache_of(config.layers, dtype), []
    width, texts = head_width(config), [tokens(50), tokens(33, seed=2)]
    for row, text in enumerate(texts):
        features = randn(len(text), width, seed=row)
        for piece in (slice(0, 20), slice(20, len(text))):
            parents = chain_parents(1, len(text[piece]), "cpu")
            view = cache.view([span_of([row], [piece.start], parents)])
            found.append(model(text[piece], model.fuse(features[piece]), cache, view))
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]]).expand(2, -1)
    view = cache.view([span_of([1, 0], [33, 50], parents)])
    found.append(model(tokens(12, seed=5), model.fuse(randn(12, width, seed=9)), cache, view))
    output = torch.cat(found)
    return output, model.logits(output)


@one_thread
def test_a_head_computes_what_torch_computes(kernels: Library, config: EagleConfig) -> None:
    compiled = read(native_of(config), config, torch.bfloat16)
    exact = read(Torch(config, torch.float32), config, torch.float32)
    plain = read(Torch(config, torch.bfloat16), config, torch.bfloat16)
    for ours, true, theirs in zip(compiled, exact, plain, strict=True):
        # As near to float32 as torch's own bfloat16 is, which rounds at the same places and a few more.
        assert (ours - true).norm() <= 1.1 * (theirs - true).norm()
    assert (compiled[1].argmax(-1) == plain[1].argmax(-1)).float().mean() > 0.9


@one_thread
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_quantised_head_computes_about_the_same(kernels: Library, name: str, config: EagleConfig) -> None:
    output, _ = read(native_of(config, name), config, torch.bfloat16)
    exact, _ = read(Torch(config, torch.float32), config, torch.float32)
    assert (output - exact).norm() <= {"int8": 0.05, "int4": 0.35}[name] * exact.norm()


@one_thread
def test_a_head_whose_features_are_wider_numbers_is_left_to_torch(kernels: Library) -> None:
    head = head_of(HEADS["3 of another width"], torch.bfloat16, True)
    assert NativeEagle.of(head, decoder_of(torch.float32, True)) is None
    assert NativeEagle.of(head, decoder_of(torch.bfloat16, True)) is not None


@one_thread
def test_a_slot_has_the_same_bits_in_any_company(kernels: Library, config: EagleConfig) -> None:
    model, text = native_of(config), tokens(40)
    hidden = randn(40, config.layers.hidden_size)
    together = model(text, hidden, cache := cache_of(config.layers), cache.view([span_of([2], [0], chain(40))]))
    cache, alone = cache_of(config.layers), []
    for slot in range(40):
        view = cache.view([span_of([0], [slot % 7], chain(3)), span_of([2], [slot], chain(1))])
        company = torch.cat([randn(3, hidden.shape[1]), hidden[slot : slot + 1]])
        alone.append(model(torch.cat([tokens(3), text[slot : slot + 1]]), company, cache, view)[3:])
    assert torch.equal(torch.cat(alone), together)


def chain(length: int) -> Tensor:
    return chain_parents(1, length, torch.device("cpu"))


def sampling_row(temperatures: list[float], row: int, options: dict[str, Any]) -> RowSampling:
    return RowSampling(SamplingParams(temperature=temperatures[row], **options), 1234567 + row, [], VOCAB)


def sampling_of(temperatures: list[float], **options: Any) -> Sampling:
    return Sampling.of([sampling_row(temperatures, row, options) for row in range(len(temperatures))])


def draw(scores: Tensor, position: Tensor, sampling: Sampling) -> Tensor:
    """[B] what `sample` draws from scores [B, V] at the position."""
    root = torch.zeros(len(scores), 1, dtype=torch.int64)
    return sample(scores.unsqueeze(1), Draft(root, root - 1), (root == 0).unsqueeze(2), position - 1, sampling)[:, 0]


@pytest.mark.parametrize("temperatures", [[0.0, 0.0, 0.0], [0.7, 1.0, 1.5], [0.0, 1.0, 0.3]])
def test_a_chain_is_step_by_step_drawing(kernels: Library, config: EagleConfig, temperatures: list[float]) -> None:
    model, sampling = native_of(config), sampling_of(temperatures)
    head = head_of(config, torch.bfloat16, False)
    rows, lengths, levels = [3, 0, 1], [40, 1, 66], 5
    texts = [tokens(length, seed=row) for row, length in zip(rows, lengths, strict=True)]
    features = [randn(length, head_width(config), seed=row) for row, length in zip(rows, lengths, strict=True)]
    certain = Committed(rows, [0, 0, 0], [text.tolist() for text in texts], torch.cat(features))
    found, shares, *_ = model.guess(certain, cache_of(config.layers), [levels] * 3, sampling, None)
    cache, ids = cache_of(config.layers), head.draft_ids if config.own_head else torch.arange(VOCAB)
    output = torch.cat([
        model(text, model.fuse(part), cache, cache.view([span_of([row], [0], chain(len(text)))]))[-1:]
        for row, text, part in zip(rows, texts, features, strict=True)
    ])  # fmt: skip
    expected, clear = [torch.stack([text[-1] for text in texts])], []
    for level in range(levels):
        scores = torch.full((3, VOCAB), -torch.inf)
        scores[:, ids] = model.logits(output)
        ranked = rank(scores.unsqueeze(1), torch.tensor(lengths) + level + 1, sampling, 1)[1]
        clear.append(ranked.flatten().exp())
        expected.append(draw(scores, torch.tensor(lengths) + level + 1, sampling))
        view = cache.view([span_of(rows, [length + level for length in lengths], chain(1).expand(3, -1))])
        output = model(expected[-1], head.recycle(output), cache, view)
    assert torch.equal(found, torch.stack(expected, dim=1))
    assert len(found.unique()) > 6
    torch.testing.assert_close(shares.squeeze(2), torch.stack(clear, dim=1), rtol=1e-3, atol=1e-6)


@one_thread
@pytest.mark.parametrize("name", ["1", "3", "3.1"])
@pytest.mark.parametrize(
    ("temperatures", "options", "branches"),
    [
        ([0.0, 0.0, 0.0], {}, 2),
        ([0.7, 1.0, 1.5], {}, 3),
        ([0.0, 1.0, 0.3], {"top_k": 40, "top_p": 0.8, "min_p": 0.01}, 2),
        ([1e-6, 0.01, 0.002], {}, 3),  # most probabilities are too small for a float
        ([1.0, 1.0, 0.5], {"top_p": 0.05}, 3),  # a nucleus of one token: fewer children than branches
    ],
)
def test_a_tree_is_grown_level_by_level(
    kernels: Library, name: str, temperatures: list[float], options: dict[str, Any], branches: int
) -> None:
    """Compiled trees against those of `drafters.growing`, in rows that have read different amounts and go on."""
    config, rows = HEADS[name], [3, 0, 1]
    target, sampling = decoder_of(torch.bfloat16, True), sampling_of(temperatures, **options)
    drafters = [
        EagleDrafter(head_of(config, torch.bfloat16, True), target, cache_of(config.layers), max_draft_len=4,
                     branches=branches, budget=9)
        for _ in range(2)
    ]  # fmt: skip
    drafters[1].guesser.branch = lambda *_: None  # type: ignore[method-assign]
    found: list[list[Tensor]] = [[], []]
    for step, lengths in enumerate([(20, 1, 33), (1, 3, 2), (2, 1, 1)]):
        for drafter, drafts in zip(drafters, found, strict=True):
            if step == 0:
                for row in rows:
                    drafter.admit(row, [])
            texts = [tokens(length, seed=10 * step + row).tolist() for row, length in zip(rows, lengths, strict=True)]
            drafter.observe(rows, texts, randn(sum(lengths), head_width(config), seed=step))
            draft = drafted(drafter, rows, [5, 6, 7], [4, 1 + step, 3], sampling)
            drafts += [draft.tokens, draft.parents]
    assert all(map(torch.equal, *found))


def blunt(factor: float) -> Decoder:
    """The target with its last norm, and so its scores, multiplied."""
    decoder = decoder_of(torch.bfloat16, False)
    decoder.norm.weight.data.mul_(factor)
    for module in decoder.modules():
        if isinstance(module, Linear | Embedding):
            module.pack()
    return decoder


def first_draws(decoder: Decoder, sampling: Sampling, starts: list[int]) -> tuple[Tensor, Tensor]:
    """What a guess of one token draws after one token in each of so many rows, and what `sample` does."""
    rows, text, native = [*range(len(starts))], tokens(len(starts), seed=4), decoder.native
    assert native is not None
    caches = [cache_of(TARGET, rows=len(starts)) for _ in range(2)]
    certain = Committed(rows, starts, text.unsqueeze(1).tolist())
    found = native.guess(certain, caches[0], [1] * len(rows), sampling, None).tokens
    view = caches[1].view([span_of(rows, starts, chain(1).expand(len(rows), -1))])
    scores = decoder.logits(decoder(text, caches[1], view).last)
    return found[:, 1], draw(scores, torch.tensor(starts) + 1, sampling)


@one_thread
def test_the_noise_has_the_bits_of_the_hash(kernels: Library) -> None:
    decoder, starts = blunt(0.0), [*range(120)]  # all scores are equal, so that the noise alone decides
    for seed in (0, 1, -1, 2**63 - 1, 0x123456789ABCDEF):
        sampling = Sampling.of([RowSampling(SamplingParams(temperature=1.0), seed, [], VOCAB)] * len(starts))
        found, expected = first_draws(decoder, sampling, starts)
        assert torch.equal(found, expected)
        assert len(found.unique()) > 90


@one_thread
@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_k": 7}, {"top_p": 0.3}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01}]
)
def test_a_guess_is_drawn_from_what_truncation_leaves(kernels: Library, options: dict[str, Any]) -> None:
    decoder, drawn = decoder_of(torch.bfloat16, True), []
    for temperature in (0.4, 1.0, 2.0):
        temperatures = [0.0 if row % 5 == 4 else temperature for row in range(24)]
        found, expected = first_draws(decoder, sampling_of(temperatures, **options), [3] * 24)
        assert torch.equal(found, expected)
        drawn.append(found)
    assert torch.equal(drawn[0], drawn[2]) == (options == {"top_k": 1})


@one_thread
@pytest.mark.parametrize("temperatures", [[1e-30, 1e-3, 1e30], [0.0, 2.0, 50.0]])
def test_extreme_scores_draw_tokens(kernels: Library, temperatures: list[float]) -> None:
    """Scores so far apart, or temperatures such, that no float32 holds a probability, never leave the vocabulary."""
    found, expected = first_draws(blunt(1e4), sampling_of(temperatures), [5, 6, 7])
    assert torch.equal(found, expected)


def drafts_by_hand(worth: Worth, found: Guesses, limits: list[int]) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """The rule of stop.h: levels that are made, and the draft of each row: tokens and their parents, root left out."""
    assert found.ended is not None
    count, shares, candidates = len(limits), found.shares.tolist(), found.ended.candidates
    paths, made, rows = list(worth.weights), [0] * count, [*range(count)]
    values: list[list[list[float]]] = [[] for _ in rows]
    while rows:
        for row in rows:
            least, level = 1.0, list[float]()
            for k, share in enumerate(shares[row][made[row]]):
                table = worth.chances[k][worth.sampled[row]]
                chance = np.interp(share * (1 + k) * len(table) - 0.5, range(len(table)), table)
                least = min(least, float(chance) if share > 0 else 0.0)
                level.append(paths[row] * least)
            values[row].append(level)
            paths[row], made[row] = level[0], made[row] + 1
        gains = {}
        for row in rows:
            ranks = len(worth.typical) if worth.siblings[row] else 1
            each = (paths[row] * worth.typical[k][worth.sampled[row]] - worth.time.verify for k in range(ranks))
            gains[row] = sum(max(0.0, value) for value in each) - worth.time.guess
        rows = [row for row in rows if made[row] < limits[row] and gains[row] > 0]
        rows = rows if sum(gains[row] for row in rows) > worth.time.level else []
    drafts = []
    for row in range(count):
        right = [each for each in values[row] if each[0] > worth.time.verify]
        others = [(-value, i, k) for i, each in enumerate(right) for k, value in enumerate(each) if k]
        taken = [each for each in sorted(others) if -each[0] > worth.time.verify][: worth.siblings[row]]
        beside = [(candidates[row][i][k], i) for i, k in sorted(each[1:] for each in taken)]
        drafts.append([(candidates[row][i][0], i) for i in range(len(right))] + beside)
    return made, drafts


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("recycled", [False, True], ids=["decoder", "head"])
def test_drafts_are_what_is_worth_its_time(kernels: Library, seed: int, recycled: bool) -> None:
    """Whatever guesses are worth: rows end one by one, siblings stand beside the chain, and each draft is a tree."""
    luck, rows, levels, ranks = random.Random(seed), [3, 0, 1, 2], 5, 1 + seed % 4
    texts = [tokens(length, seed=row) for row, length in zip(rows, (40, 1, 66, 9), strict=True)]
    limits, sampling = [luck.randint(1, levels) for _ in rows], sampling_of([0.0, 1.0, 0.7, 0.0])
    features = torch.cat([randn(len(text), head_width(EAGLE_3), seed=i) for i, text in enumerate(texts)])
    model = native_of(EAGLE_3) if recycled else decoder_of(torch.bfloat16, True).native
    assert model is not None
    read = Committed(rows, [0] * 4, [text.tolist() for text in texts], features if recycled else None)
    layers = EAGLE_3.layers if recycled else TARGET
    free = model.guess(read, cache_of(layers), [levels] * 4, sampling, None)
    assert free.ended is None
    worth = Worth(
        [[sorted(luck.random() for _ in range(10)) for _ in range(2)] for _ in range(ranks)],
        [[luck.random() / (1 + k) for _ in range(2)] for k in range(ranks)],
        [luck.random() < 0.5 for _ in rows], [luck.uniform(0.2, 1) for _ in rows],
        Time(*(luck.uniform(0, 0.1) for _ in range(3))), [luck.randint(0, 4) for _ in rows],
    )  # fmt: skip
    found = model.guess(read, cache_of(layers), limits, sampling, worth)
    made, drafts = drafts_by_hand(worth, found, limits)
    assert found.ended is not None
    assert found.tree is not None
    parents, written = found.tree
    assert found.ended.made == made
    assert found.tokens.shape[1] == 1 + max(map(sum, zip(limits, worth.siblings, strict=True)))
    for row, draft in enumerate(drafts):
        nodes, length = 1 + len(draft), sum(count > 0 for count in found.ended.kept[row])
        assert [*zip(found.tokens[row, 1:nodes].tolist(), parents[row, 1:nodes].tolist(), strict=True)] == draft
        assert torch.equal(found.tokens[row, : 1 + length], free.tokens[row, : 1 + length])
        assert (found.tokens[row, nodes:] == PADDING).all()
        assert sum(found.ended.kept[row]) == len(draft)
        assert torch.equal(found.shares[row, : made[row], 0], free.shares[row, : made[row], 0])
        ran = [n - 1 if 0 < n <= length and n < made[row] else -1 for n in range(len(written[row]))]
        assert written[row].tolist() == ran


CERTAIN = Worth([[[1.0] * 10] * 2] * 4, [[1.0] * 2] * 4, [True] * 3, [1.0] * 3, Time(0.0, 0.0, 0.0), [15] * 3)


@one_thread
@pytest.mark.parametrize(
    ("temperatures", "options"),
    [
        ([0.0, 0.0, 0.0], {}),
        ([0.7, 1.0, 1.5], {}),
        ([0.0, 1.0, 0.3], {"top_k": 40, "top_p": 0.8, "min_p": 0.01}),
        ([0.0, 1.0, 2.0], {"top_k": 3}),
        ([1.0, 1.0, 0.5], {"top_p": 0.05}),  # a nucleus of one token
    ],
)
def test_siblings_are_the_next_best_of_the_draw(
    kernels: Library, temperatures: list[float], options: dict[str, Any]
) -> None:
    decoder, sampling, rows, levels = (
        decoder_of(torch.bfloat16, True),
        sampling_of(temperatures, **options),
        [2, 0, 1],
        4,
    )
    assert decoder.native is not None
    texts = [tokens(length, seed=row) for row, length in zip(rows, (20, 1, 33), strict=True)]
    read = Committed(rows, [0] * 3, [text.tolist() for text in texts])
    worth = CERTAIN._replace(sampled=[temperature > 0 for temperature in temperatures])
    found = decoder.native.guess(read, cache_of(TARGET), [levels] * 3, sampling, worth)
    assert found.ended is not None
    for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
        cache, path = cache_of(TARGET), torch.cat([text, found.tokens[at, 1:levels]])
        view = cache.view([span_of([row], [0], chain(len(path)))])
        scores = decoder.logits(decoder(path, cache, view).last[len(text) - 1 :])
        every = Sampling.of([sampling_row(temperatures, at, options)] * levels)
        ranked, shares = rank(scores, len(text) + torch.arange(levels), every, 4)
        assert found.ended.candidates[at] == ranked.tolist()
        if "top_p" not in options:  # a draw's share leaves the end of the nucleus open
            torch.testing.assert_close(found.shares[at], shares.exp(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("recycled", [False, True], ids=["decoder", "head"])
def test_what_was_accepted_is_known_to_the_next_guesses(kernels: Library, recycled: bool) -> None:
    """After any path of a draft, a sibling at its end or not, guesses are those of a drafter that read all of it."""
    luck, target, sampling = random.Random(5), decoder_of(torch.bfloat16, True), sampling_of([0.0, 1.0, 0.7])
    known: list[list[int]] = [tokens(length, seed=length).tolist() for length in (9, 1, 30)]
    features = [randn(200, head_width(EAGLE_3), seed=row) for row in range(3)]
    worth, siblings = CERTAIN._replace(sampled=[False, True, True]), 0

    def made() -> GrowingDrafter:
        if recycled:
            head = head_of(EAGLE_3, torch.bfloat16, True)
            return EagleDrafter(head, target, cache_of(EAGLE_3.layers), max_draft_len=4, branches=1, budget=None)
        return DraftModelDrafter(target, cache_of(TARGET), max_draft_len=4)

    def told(drafter: GrowingDrafter, begins: list[int]) -> Draft:
        parts = [text[begin:-1] for text, begin in zip(known, begins, strict=True)]
        read = [
            features[row][begin : begin + len(part)] for row, begin, part in zip(range(3), begins, parts, strict=True)
        ]
        drafter.observe(range(3), parts, torch.cat(read) if recycled else None)
        return drafted(drafter, range(3), [text[-1] for text in known], [4, 3, 4], sampling, worth)

    drafter, begins = made(), [0] * 3
    for row in range(3):
        drafter.admit(row, [])
    known = [[*text, 7] for text in known]
    for _ in range(6):
        draft, fresh = told(drafter, begins), made()
        for row in range(3):
            fresh.admit(row, [])
        again = told(fresh, [0] * 3)
        assert torch.equal(draft.tokens, again.tokens)
        assert torch.equal(draft.parents, again.parents)
        begins = [len(text) - 1 for text in known]
        for text, guesses, parents in zip(known, draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            node = luck.choice([node for node, token in enumerate(guesses) if token != PADDING])
            path = []
            siblings += node > 0 and parents[node] != node - 1
            while node > 0:
                path.append(guesses[node])
                node = parents[node]
            text += [*reversed(path), luck.randrange(VOCAB)]
    assert siblings > 3
