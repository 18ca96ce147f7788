"""Prediction blocks inside checkpoints: numbers of transformers' `MtpModel`, texts of plain decoding, refusals.

The blocks are random, so that their guesses are seldom accepted; `test_accepted_guesses` gives true ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

import mtp_makers
from cli_checks import Pair
from engine_checks import DEPTH, PAGE, alone, check_idle, make_llm, prompts, said, watch
from head_checks import shape_of
from quantised_makers import PROJECTIONS, quantised
from sametoken import LLM, SamplingParams
from sametoken.drafters.padded import chain
from sametoken.errors import CheckpointError, ConfigError, DraftMismatchError, UnsupportedModelError
from sametoken.heads.mtp import drafts
from sametoken.heads.read import is_head, read_head
from sametoken.kernels.cpu.variant import library

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = prompts(5)
REQUESTS = [
    (prompt, SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=12, ignore_eos=True, logprobs=2))
    for i, prompt in enumerate(TEXTS)
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Target(NamedTuple):
    """A target on disk, and its parts as transformers has them."""

    directory: str
    model: PreTrainedModel
    own: MtpModel


class Seen(NamedTuple):
    """A chain that the block guesses after a text whose last token is pending, and the logits [K, V] of its guesses."""

    text: list[int]
    tokens: list[int]
    logits: Tensor


@pytest.fixture(scope="module", params=mtp_makers.FAMILIES)
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp(request.param)
    return Target(str(directory), *mtp_makers.save_target(request.param, directory))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("glm")
    return Target(str(directory), *mtp_makers.save_target("glm-4.5-moe", directory))


def noted(llm: LLM) -> list[Seen]:
    """Guesses of the block from now on, of one row at a time."""
    drafter: Any = llm.engine.drafters["mtp"]
    seen: list[Seen] = []
    propose, scores = drafter.propose, drafter.guesser.scores
    logits: list[Tensor] = []

    def score(output: Tensor) -> Tensor:
        logits.append(scores(output))
        return logits[-1]

    def spy(rows: Sequence[int], pending: Sequence[int], *others: Any) -> Any:
        logits.clear()
        found = propose(rows, pending, *others)
        seen.append(Seen([*drafter._rows[rows[0]].text, pending[0]], found.drafts[0].tokens, torch.cat(logits)))
        return found

    drafter.propose, drafter.guesser.scores = spy, score
    return seen


def check_numbers(target: Target, seen: Sequence[Seen], *, normed: bool = True) -> None:
    """The logits of every step are those of transformers over the whole text, and the guesses the best tokens."""
    assert seen
    for text, tokens, logits in seen:
        expected = torch.stack(mtp_makers.chain_of(target.model, target.own, text, tokens[:-1], normed=normed))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert expected.argmax(-1).tolist() == tokens


def test_guesses_are_those_of_transformers(target: Target) -> None:
    llm = make_llm(target.directory, method="mtp")
    seen = noted(llm)
    for text in TEXTS:
        llm.generate(text, GREEDY)
    assert max(len(each.text) for each in seen) > 4 * PAGE
    check_numbers(target, seen[::3])


def test_transformers_reads_the_same_files(target: Target) -> None:
    """The makers' names are not their own invention, where transformers has the family."""
    if "mimo" in Path(target.directory).name:
        pytest.skip("transformers has no MiMo")
    model = AutoModelForCausalLM.from_pretrained(target.directory, dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [r"layers\.3\."]  # there by the number of layers of the published model
    read = MtpModel.from_pretrained(model)
    for name, parameter in target.own.layers.named_parameters():
        torch.testing.assert_close(read.layers.get_parameter(name), parameter, msg=name)


@pytest.mark.parametrize("normed", [True, False])
def test_the_state_that_is_fed_back_shows_from_the_second_guess_on(
    glm: Target, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = drafts.LAYOUTS["glm4_moe"]._replace(recycles_normed=normed)
    monkeypatch.setitem(drafts.LAYOUTS, "glm4_moe", changed)
    llm = make_llm(glm.directory, method="mtp")
    seen = noted(llm)
    llm.generate(TEXTS[1], GREEDY)
    check_numbers(glm, seen, normed=normed)
    text, tokens, logits = seen[0]
    other = torch.stack(mtp_makers.chain_of(glm.model, glm.own, text, tokens[:-1], normed=not normed))
    apart = (logits - other).abs().amax(-1)
    assert apart[0] < 1e-4
    assert apart[1:].min() > 0.01


def test_the_order_of_the_parts_matters(glm: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drafts.LAYOUTS, "glm4_moe", drafts.LAYOUTS["glm4_moe"]._replace(hidden_first=True))
    llm = make_llm(glm.directory, method="mtp")
    seen = noted(llm)
    llm.generate(TEXTS[1], GREEDY)
    with pytest.raises(AssertionError, match="not close"):
        check_numbers(glm, seen)


@pytest.mark.parametrize("family", ["deepseek-v3", "glm-4.5-moe"])
def test_the_block_of_a_gguf_file(family: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    target = Target(str(file), *mtp_makers.write_file(family, file))
    llm = make_llm(target.directory, method="mtp")
    seen = noted(llm)
    expected = [alone(llm, text, GREEDY) for text in TEXTS]
    assert [said(llm.generate(text, GREEDY)[0]) for text in TEXTS] == [said(each) for each in expected]
    check_numbers(target, seen[::3])


def test_a_rounded_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    mtp_makers.write_file("glm-4.5-moe", tmp_path / "model.gguf", "Q8_0")
    llm = make_llm(str(tmp_path / "model.gguf"), method="mtp")
    expected = [alone(llm, *request) for request in REQUESTS]
    assert [said(g) for g in llm.generate(TEXTS, [params for _, params in REQUESTS])] == [said(e) for e in expected]


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
def test_compiled_guesses_are_mostly_those_of_transformers(target: Target) -> None:
    """In bfloat16, rounding chooses other experts and tokens now and then; latent attention is not compiled."""
    llm = make_llm(target.directory, method="mtp", dtype="bfloat16")
    drafter: Any = llm.engine.drafters["mtp"]
    assert (drafter.guesser._native is None) == (llm.engine.runner.decoder.config.latent is not None)
    seen: list[tuple[list[int], int]] = []
    propose = drafter.propose

    def spy(rows: Sequence[int], pending: Sequence[int], *others: Any) -> Any:
        found = propose(rows, pending, *others)
        seen.append(([*drafter._rows[rows[0]].text, pending[0]], found.drafts[0].tokens[0]))
        return found

    drafter.propose = spy
    for text in TEXTS:
        llm.generate(text, GREEDY)
    right = [int(mtp_makers.chain_of(target.model, target.own, text, [])[0].argmax()) == token for text, token in seen]
    assert sum(right) > 0.7 * len(right)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tree": {"tree_top_k": 3, "max_total_draft_tokens": 7},
    "long": {"max_draft_len": 9},
    "adaptive": {"adaptive": True},
    "compiled": {"dtype": "bfloat16", "adaptive": True, "max_draft_len": 6},
    "compiled tree": {"dtype": "bfloat16", "tree_top_k": 3, "max_total_draft_tokens": 7},
    "pieces": {"max_num_tokens": 16, "max_mixed_prefill_tokens": 3},
    "preempted": {"max_seq_len": 64, "cache": {"max_tokens": 96}},
}


@pytest.mark.cover
@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_are_those_of_plain_decoding(target: Target, setting: str) -> None:
    llm = make_llm(target.directory, method="mtp", **SETTINGS[setting])
    expected = [alone(llm, *request) for request in REQUESTS]
    plans = watch(llm)
    for _ in range(2):  # the second time with the pages of the first
        got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
        assert [said(g) for g in got] == [said(e) for e in expected]
        assert all(g.speculation.drafted_by.get("mtp", 0) > 0 for g in got) or llm.speculative.adaptive
    assert any(plan.preempted for plan in plans) == (setting == "preempted")
    check_idle(llm.engine)


@pytest.mark.cover
def test_accepted_guesses(target: Target) -> None:
    """Texts and later guesses stay right when guesses are accepted."""
    llm = make_llm(target.directory, method="mtp")
    expected = alone(llm, TEXTS[1], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    whole = [*expected.prompt_token_ids, *expected.token_ids]
    seen = noted(llm)
    drafter: Any = llm.engine.drafters["mtp"]
    propose = drafter.propose

    def partly_true(rows: Any, pending: Any, limits: Any, *others: Any) -> Any:
        found = propose(rows, pending, limits, *others)
        start = len(seen[-1].text)
        true = whole[start : start + max(limits)]
        return found._replace(drafts=[chain([*true[: len(seen) % (DEPTH + 1)], 99][: max(limits)])])

    drafter.propose = partly_true
    got = llm.generate(TEXTS[1], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0]
    assert got.token_ids == expected.token_ids
    assert max(got.speculation.accepted_lengths) > 0
    check_numbers(target, seen)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rounded_block_drafts(glm: Target, quantization: str) -> None:
    llm = make_llm(glm.directory, method="mtp", draft_quantization=quantization)
    expected = [alone(llm, *request) for request in REQUESTS]
    assert [said(g) for g in llm.generate(TEXTS, [params for _, params in REQUESTS])] == [said(e) for e in expected]


@pytest.mark.parametrize("name", ["fp8-deepseek", "nvfp4", "w8a8"])
def test_a_block_that_other_tools_quantised(glm: Target, name: str, tmp_path: Path) -> None:
    """With the copy of the output layer, whose scales are not read either."""
    place = quantised(Path(glm.directory), name, tmp_path / "made", chosen=(*PROJECTIONS, "shared_head.head"))
    llm = make_llm(str(place), method="mtp")
    expected = [alone(llm, *request) for request in REQUESTS]
    assert [said(g) for g in llm.generate(TEXTS, [params for _, params in REQUESTS])] == [said(e) for e in expected]


def test_the_first_of_several_blocks_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mtp_makers.save_target("mimo", tmp_path, blocks=3)
    make_llm(str(tmp_path), method="mtp").generate(TEXTS[0], GREEDY)
    assert "3 prediction blocks, of which the first makes every guess" in caplog.text


def test_a_target_without_its_block_is_refused(tmp_path: Path, pair: Pair) -> None:
    mtp_makers.save_target("glm-4.5-moe", tmp_path / "stripped", block=False)
    with pytest.raises(
        DraftMismatchError, match=r"no prediction block \(tensors model.layers.3.\*\).*give a checkpoint"
    ):
        make_llm(str(tmp_path / "stripped"), method="mtp")
    with pytest.raises(UnsupportedModelError, match=r"family llama, expected .*deepseek_v3, glm4_moe, mimo.*; leave"):
        make_llm(pair.target, method="mtp")
    with pytest.raises(ConfigError, match="draft_vocab_size 8: there is no draft model"):
        make_llm(str(tmp_path / "stripped"), method="mtp", draft_vocab_size=8)


def test_a_damaged_block_is_refused_by_the_names_of_its_file(glm: Target, tmp_path: Path) -> None:
    for file in Path(glm.directory).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"], tensors["model.layers.3.mlp.experts.2.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"2 missing: .*layers.3.eh_proj.weight.*layers.3.mlp.experts.2.down_proj"
    ):
        make_llm(str(tmp_path), method="mtp")
    make_llm(str(tmp_path), method="suffix")


def test_a_whole_model_is_no_head_unless_the_method_says_so(glm: Target) -> None:
    place = Path(glm.directory)
    assert (is_head(place), is_head(place, "eagle3"), is_head(place, "mtp")) == (False, False, True)
    head = read_head(place, shape_of(glm.directory), torch.float32, "cpu", pack=False, method="mtp")
    assert head.config.layers.experts.layers == (True,)
    assert sum(parameter.numel() for parameter in head.module.parameters()) > 0


def test_commands(run: Any, glm: Target) -> None:
    answer = run("generate", glm.directory, "--method", "mtp", "--prompt", "one two", "--max-tokens", "12", "--json",
                 "--no-adaptive")  # fmt: skip
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["speculation"]["method"] == "mtp"
    assert json.loads(answer.out)["speculation"]["drafted"] > 0
    proof = run("verify", glm.directory, "--method", "mtp", "--num-prompts", "1", "--max-tokens", "8")
    assert proof.code == 0, proof.err
    assert "all equal" in proof.out
    assert "mtp" in proof.out
    words = ("--method", "mtp", "--repeat", "1", "--limit", "1", "--output-len", "8")
    bench = run("bench", glm.directory, *words)
    assert bench.code == 0, bench.err
    assert "mtp" in bench.out


def test_doctor_finds_the_block_and_counts_its_memory(run: Any, glm: Target) -> None:
    plain = json.loads(run("doctor", glm.directory, "--json").out)
    assert [(head["kind"], head["words"]) for head in plain["heads"]] == [
        ("MTP", "part of the target; use --method mtp")
    ]
    counted = json.loads(run("doctor", glm.directory, "--method", "mtp", "--json").out)
    target, head = counted["parts"]
    assert (target["role"], head["role"]) == ("target", "head")
    assert head["weights"] > target["weights"] // 5
    assert head["token_bytes"] == target["token_bytes"] // 3


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", '{"method": "mtp", "num_speculative_tokens": 3}'),
        ("sglang", "--speculative-algorithm NEXTN"),
        ("sglang", "--speculative-num-steps 3"),
        ("trtllm", "decoding_type: MTP"),
        ("trtllm", "num_nextn_predict_layers: 3"),
    ],
)
def test_plans_for_other_engines(run: Any, engine: str, words: str) -> None:
    answer = run("deploy", "plan", "zai-org/GLM-4.5-Air", "--method", "mtp", "--max-draft-len", "3", "--engine", engine)
    assert answer.code == 0, answer.err
    assert words in answer.out.replace(" \\\n   ", "")
