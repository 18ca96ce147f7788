"""`verify` finds faults and names them, `demo` shows what ran; the embedded pair passes both."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rich.console import Console

from cli_checks import Pair, greedy
from sametoken import LLM, LosslessnessError, SamplingParams, embedded
from sametoken.check import race
from sametoken.commands import demo
from sametoken.commands.verify import print_proof
from sametoken.drafters.padded import Guess
from sametoken.engine.advice import UNUSED
from sametoken.engine.host import HostRunner
from sametoken.engine.plan import Plan
from sametoken.engine.runner import Verified
from sametoken.prompts.sources import BUILT_IN, EncodedPrompt


class Broken(HostRunner):
    """A verifier with a fault: after a draft, the target's own next token is replaced."""

    def __init__(self, sound: HostRunner) -> None:
        super().__init__(sound.decoder, sound.cache, sound.taps, sound.rows, sound.meter)

    def forward(self, plan: Plan, pending: Sequence[int], guesses: Sequence[Guess], sampling: Any) -> Verified:
        found = super().forward(plan, pending, guesses, sampling)
        if not any(guess.tokens for guess in guesses):
            return found
        return found._replace(bonuses=[(bonus + 1) % 100 for bonus in found.bonuses])


# --- verify


def test_verify_compares_every_method_and_is_content(run: Any, pair: Pair) -> None:
    arguments = ["--draft", pair.draft, "--num-prompts", "3", "--max-tokens", "8"]
    answer = run("verify", pair.target, *arguments)
    assert answer.code == 0
    rows = [line.split("│")[1:-1] for line in answer.out.splitlines() if line.startswith("│")]
    cases = [tuple(cell.strip() for cell in row[:3]) for row in rows]
    ways = [(m, b) for m in ("ngram", "suffix", "draft_target") for b in ("one by one", "3 together")]
    expected = [(m, t, b) for t in ("0", "0.7", "1") for m, b in [("none", "3 together"), *ways]]
    assert sorted(cases) == sorted(expected)
    assert {row[5].strip() for row in rows} == {"equal"}
    assert answer.out.splitlines()[-1].startswith("all equal: ")


def test_verify_gives_no_advice_on_a_draft_that_had_its_turn(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(pair.target, pair.draft)
    prompts = [EncodedPrompt(text, llm.tokenizer.encode(text)) for text in ("a", "b") * UNUSED]
    assert print_proof(llm, prompts, SamplingParams(max_tokens=2), [0.0], ["none", "draft_target"]) == 0
    assert not caplog.messages


def test_verify_finds_a_broken_verifier_and_says_where(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(pair.target, pair.draft)
    llm.engine.runner = Broken(llm.engine.runner)
    text = "one two one two"
    prompts = [EncodedPrompt(text, llm.tokenizer.encode(text))]
    assert print_proof(llm, prompts, SamplingParams(max_tokens=8), [0.0], ["draft_target"]) == 1
    out = capsys.readouterr().out
    assert "different" in out
    last = out.splitlines()[-1]
    assert last.startswith(f"first difference: method draft_target, temperature 0, one by one, prompt 0 {text!r}, ")
    position = int(last.partition("position ")[2].partition(":")[0])
    expected = greedy(pair.oracle, text, 8)
    assert f"plain {expected[position]} " in last
    ids = torch.tensor([prompts[0].ids + expected[:position]])
    with torch.no_grad():
        best, second = pair.oracle(ids).logits[0, -1].topk(2).values.tolist()
    assert float(last.rpartition(" ")[2]) == pytest.approx(best - second, abs=1e-3)


def test_the_built_in_prompts_are_many_and_distinct() -> None:
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 24


# --- demo


def test_demo_prints_both_sides_without_control_codes(run: Any, pair: Pair) -> None:
    arguments = ["--draft", pair.draft, "--max-tokens", "10", "--repeat", "2"]
    answer = run("demo", pair.target, *arguments)
    assert answer.code == 0
    assert "\x1b" not in answer.out
    assert all(f"> {prompt}" in answer.out for prompt in demo.PROMPTS)
    assert answer.out.count("draft_target, ⟦drafted and accepted⟧:") == len(demo.PROMPTS)
    assert "draft_target: 40 tokens, identical to plain decoding's" in answer.out


def test_demo_replays_in_a_terminal(pair: Pair) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, highlight=False)
    llm = LLM(pair.target, pair.target, {"adaptive": False})
    demo.show([llm], demo.PROMPTS, SamplingParams(max_tokens=4, temperature=0.0), 1, console)
    assert "\x1b[1;32m" in screen.getvalue()  # the same model as its own draft: accepted
    assert screen.getvalue().count(" plain ") >= len(demo.PROMPTS)
    assert "\x1b[32m" not in screen.getvalue()


def test_demo_refuses_outputs_that_differ(pair: Pair) -> None:
    llm = LLM(pair.target, pair.draft, {"adaptive": False})
    llm.engine.runner = Broken(llm.engine.runner)
    with pytest.raises(LosslessnessError, match=r"output token \d+ differs"):
        demo.show([llm], demo.PROMPTS, SamplingParams(max_tokens=8, temperature=0), 1, Console(file=io.StringIO()))


def test_a_race_counts_what_its_completions_say(pair: Pair) -> None:
    llm = LLM(pair.target, pair.target, {"adaptive": False})
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = race.race([llm], llm.tokenizer.encode("hello"), params, 2)
    for take in found.takes:
        assert "".join(race.pieces(llm, take.completion, params)).replace("\n", "") == take.completion.text
        assert take.tokens_at(0.0) == 0
        assert take.tokens_at(take.frames[-1][0]) == len(take.completion.token_ids) == 12
    assert len(found.plain.frames) == 12
    (drafted,), (scored,) = found.drafted, race.score([found])
    assert len(drafted.frames) < 12
    assert scored.acceptance_length == pytest.approx(12 / drafted.completion.speculation.target_forwards)


def test_brackets_hold_what_was_drafted() -> None:
    assert demo._bracketed(["a", "b", "c", "", "d", "e"], [False, True, True, False, True, False]) == "a⟦bcd⟧e"
    assert demo._bracketed(["a", "b"], [True, True]) == "⟦ab⟧"
    assert demo._bracketed(["a", "b", "\n"], [False, True, True]) == "a⟦b⟧\n"


# --- the embedded pair


def test_the_embedded_pair_is_the_default(run: Any) -> None:
    arguments = ["--prompt", "Tell me a story.", "--chat", "--max-tokens", "24", "--temperature", "0", "--json"]
    arguments.append("--no-adaptive")
    speculative = json.loads(run("generate", *arguments).out)
    plain = json.loads(run("generate", "embedded", "--method", "none", *arguments).out)
    named = json.loads(run("generate", str(embedded.TARGET), "--draft", str(embedded.DRAFT), *arguments).out)
    assert speculative["token_ids"] == plain["token_ids"] == named["token_ids"]
    assert speculative["speculation"]["method"] == "draft_target"
    assert speculative["speculation"]["acceptance_length"] > 1.5
    assert len(speculative["text"].split()) > 10


def test_the_embedded_pair_passes_its_proof(run: Any) -> None:
    answer = run("verify", "--num-prompts", "2", "--max-tokens", "16", "--dtype", "bfloat16")
    assert answer.code == 0
    assert "draft_target" in answer.out
