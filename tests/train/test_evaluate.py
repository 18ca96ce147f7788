"""Judging heads: the same figures as the engine's own, and static trees from measured ranks."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from sametoken.engine.llm import LLM
from sametoken.errors import DataError
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.medusa.objective import MedusaObjective
from sametoken.heads.medusa.static_tree import best_tree, rank_rates
from sametoken.heads.read import read_head
from sametoken.learning.batch import Batch
from sametoken.learning.target import OuterLayers
from sametoken.learning.unroll import unroll
from sametoken.options.sampling import SamplingParams
from sametoken.prompts.conversations import read_records
from sametoken.prompts.suites import MT_BENCH, SPEED_BENCH, TASKS
from sametoken.train.evaluate import Asked, evaluate, evaluator_of, open_llm, read_questions
from sametoken.train.targets import read_outer
from sametoken.train.targets import run as run_target
from training_checks import train_tiny, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl")


@pytest.fixture(scope="module")
def heads(tiny_pair, data, tmp_path_factory) -> dict[str, str]:
    """Heads that learned some of what a tiny target says after the conversations' prompts."""
    root = tmp_path_factory.mktemp("heads")
    chosen = {"max_steps": 12, "num_epochs": 100, "save_steps": 12}
    return {
        mode: str(train_tiny(tiny_pair.target, data, root / mode, mode=mode, **chosen).head)
        for mode in ("eagle3", "eagle1", "medusa")
    }


@pytest.mark.parametrize("mode", ["eagle3", "eagle1", "medusa"])
def test_judges_as_the_engine_serves(pair, data, heads, mode):
    asked = Asked(max_draft_len=3, tokens=16)
    llm = open_llm(pair.target, heads[mode], asked)
    found = evaluate(llm, read_questions(data, llm, 6, asked.tokens), asked)

    served = LLM(pair.target, heads[mode], {"max_draft_len": 3, "adaptive": False})
    chats = [record.messages[:-1] for record in itertools.islice(read_records(data), 6)]
    completions = served.chat(chats, SamplingParams(max_tokens=16, temperature=0))
    emitted = sum(len(each.token_ids) for each in completions)
    assert (found.prompts, found.tokens) == (6, emitted)
    assert found.forwards == sum(each.speculation.target_forwards for each in completions)
    by_kind = [sum(len(c.token_ids) for c in completions[i::2]) for i in (0, 1)]
    forwards = [sum(c.speculation.target_forwards for c in completions[i::2]) for i in (0, 1)]
    assert found.by_category == {kind: n / f for kind, n, f in zip("ab", by_kind, forwards, strict=True)}
    # A position is reached only past the ones before it, so the lengths follow from the positions.
    drafts = [sum(each.speculation.drafted_lengths[1:]) for each in completions]
    assert sum(drafts) > 0
    assert len(found.by_position) <= 3
    assert evaluator_of(pair.target, str(data), 6, asked)(Path(heads[mode])) == found.acceptance_length


def test_the_command_says_it_and_fails_below_a_bound(pair, data, heads, run):
    common = ["evaluate", heads["eagle3"], "--target", pair.target, "--data", str(data), "--steps", "3", "--osl=12",
              "--num_samples", "4", "--threads", "1"]  # fmt: skip
    said = run(*common, "--json")
    assert said.code == 0
    length = json.loads(said.out)["acceptance_length"]
    assert run(*common, "--ar_lower_bound", str(length)).code == 0
    below = run(*common, "--ar_lower_bound", str(length + 0.01))
    assert below.code == 1
    assert "is below --ar-lower-bound" in below.out
    assert f"acceptance length {length:.3f}" in below.out
    assert run(*common, "--write-tree", "4").code == 2
    assert run("evaluate", heads["eagle3"], "--target", pair.target).code == 2


def test_a_tree_is_measured_and_written_into_medusa_heads(pair, data, heads, run, tmp_path):
    place = shutil.copytree(heads["medusa"], tmp_path / "heads")  # other tests draft with the chain
    said = run(
        "evaluate", str(place), "--target", pair.target, "--data", str(data), "--write-tree", "5", "--osl", "12",
        "--num_samples", "4", "--threads", "1",
    )  # fmt: skip
    assert said.code == 0, said.err
    target = open_llm(pair.target, str(place), Asked()).config
    found = read_head(place, target, torch.float32, "cpu", pack=False).config
    assert 1 <= len(found.choices) <= 5
    assert f"a tree of {len(found.choices)} nodes" in said.out


def test_rates_count_what_the_target_says_after_a_prompt():
    config = MedusaConfig(2, 0, 12, 12)
    medusa = MedusaHeads(config, torch.float32)
    MedusaObjective.first_weights(medusa, torch.eye(12), torch.Generator().manual_seed(0))  # a head says what it reads
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    last = torch.stack([torch.eye(12)[t] + 0.5 * torch.eye(12)[(t + 1) % 12] for t in tokens.roll(-2)])
    rates = rank_rates(medusa, OuterLayers(None, last, last), [(tokens, last, 3)])  # type: ignore[arg-type]
    # Head 0 reads its own answer at rank 0; head 1 has to say the token after it.
    assert rates[0].tolist() == [1.0] + [0.0] * 9
    for rank in (0, 1):
        hits = sum(int(tokens[place + 3]) == (int(tokens[place + 2]) + rank) % 12 for place in range(2, 5))
        assert rates[1, rank] == hits / 3


@pytest.mark.parametrize("nodes", [1, 4, 9, 200])
def test_the_best_tree_gains_most_of_all_trees(nodes):
    rates = torch.tensor([[0.6, 0.2, 0.1], [0.5, 0.3, 0.0], [0.1, 0.4, 0.2]])
    found = best_tree(rates, nodes)
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    value = {path: float(torch.stack([rates[i, r] for i, r in enumerate(path)]).prod()) for path in every}
    best = sorted((v for v in value.values() if v > 0), reverse=True)[:nodes]
    assert sorted((value[path] for path in found), reverse=True) == pytest.approx(best)
    MedusaConfig(3, 1, 8, 8, choices=found)  # parents before children


TURNS = [  # the form of MT-Bench's and Spec-Bench's own files
    {"question_id": 81, "category": "writing", "turns": ["say 1", "and again"], "reference": []},
    {"question_id": 82, "category": "math", "turns": ["say 2"]},
    {"question_id": 83, "category": "math", "turns": ["say 3", "more", "even more"]},
    {"question_id": 84, "category": "long", "turns": ["say 4", "x" * 240]},
]


def write_turns(file: Path) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in TURNS))
    return file


def test_turns_of_a_benchmark_follow_the_models_own_answers(pair, heads, tmp_path):
    asked = Asked(max_draft_len=3, tokens=12)
    llm = open_llm(pair.target, heads["eagle3"], asked)
    found = evaluate(llm, read_questions(write_turns(tmp_path / "bench.jsonl"), llm, 10, asked.tokens), asked)

    served, params = LLM(pair.target, heads["eagle3"], {"max_draft_len": 3, "adaptive": False}), SamplingParams(
        max_tokens=12, temperature=0
    )  # fmt: skip
    tokens: dict[str, int] = {}
    forwards: dict[str, int] = {}
    for line in TURNS:
        messages: list[dict[str, str]] = []
        for turn in line["turns"]:
            if len(turn) > 200:
                continue
            messages.append({"role": "user", "content": turn})
            (done,) = served.chat([messages], params)
            messages.append({"role": "assistant", "content": done.text})
            name = line["category"]
            tokens[name] = tokens.get(name, 0) + len(done.token_ids)
            forwards[name] = forwards.get(name, 0) + done.speculation.target_forwards
    assert (found.prompts, found.left_out) == (7, 1)
    assert (found.tokens, found.forwards) == (sum(tokens.values()), sum(forwards.values()))
    assert found.by_category == {name: tokens[name] / forwards[name] for name in sorted(tokens)}


def test_the_command_takes_a_benchmarks_file(pair, heads, run, tmp_path):
    file = write_turns(tmp_path / "bench.jsonl")
    common = ["evaluate", heads["eagle3"], "--target", pair.target, "--data", str(file), "--osl", "8", "--threads", "1"]
    said = run(*common, "--num-samples", "3")
    assert said.code == 0, said.err
    assert "writing: " in said.out
    file.write_text('{"turns": "say 1", "category": "a"}')
    refused = run(*common)
    assert refused.code == 2
    assert "expected a list of at least one text" in refused.err


def test_data_without_a_prompt_that_fits_are_refused(pair, tmp_path):
    llm = open_llm(pair.target, pair.draft, Asked())
    file = tmp_path / "long.jsonl"
    turns = [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y"}]
    file.write_text(json.dumps({"messages": turns}))
    with pytest.raises(DataError, match="no conversation has a prompt that fits"):
        read_questions(file, llm, 4, 8)


def simulated_forwards(prompt: int, tokens: list[int], right: torch.Tensor) -> int:
    """Forwards of the target for a text, if drafts are made of guesses that are `right` [K, slots] or not."""
    forwards, known = 1, prompt + 1  # reading the prompt gives the first token
    while known < len(tokens):
        slot = known - 2  # the last whose following token is certain
        accepted = int(right[:, slot].long().cumprod(0).sum())
        known, forwards = known + accepted + 1, forwards + 1
    return forwards


@pytest.mark.parametrize("mode", ["eagle3", "eagle1", "medusa"])
def test_what_is_trained_is_what_is_served(pair, data, heads, mode):
    """The unrolled forward over what the engine said predicts how many forwards the engine took, text by text."""
    steps = 2 if mode == "medusa" else 4
    llm = open_llm(pair.target, heads[mode], Asked(max_draft_len=steps))
    questions = read_questions(data, llm, 8, 24)
    completions = llm.generate([each.ids for each in questions], SamplingParams(max_tokens=24, temperature=0))
    outer = read_outer(Path(pair.target), torch.float32, torch.device("cpu"))
    head = read_head(Path(heads[mode]), outer.config, torch.float32, "cpu", pack=False).module
    source = run_target(Path(pair.target), (0, 1, 2), 128, torch.float32, torch.device("cpu"))
    took = 0
    for completion in completions:
        tokens = torch.tensor([*completion.prompt_token_ids, *completion.token_ids])
        batch = Batch.of([(tokens, torch.ones_like(tokens, dtype=torch.bool))])
        taps, last = source(0, tokens)
        with torch.no_grad():
            if mode == "medusa":
                scores = torch.stack(head.logits(last))
            else:
                states = unroll(head, outer.vectors, taps if mode == "eagle3" else last, batch, steps).normed
                scores = states @ (outer.head if head.head is None else head.head.weight).T
        guesses = scores.argmax(-1) if mode == "medusa" else head.draft_ids[scores.argmax(-1)]
        right = torch.stack([guesses[k] == batch.ahead(2 + k) for k in range(steps)])
        forwards = simulated_forwards(len(completion.prompt_token_ids), tokens.tolist(), right)
        assert forwards == completion.speculation.target_forwards
        took += forwards
    assert took < sum(len(each.token_ids) for each in completions)  # something was accepted


SUITES = {
    "mt-bench": [{"question_id": n, "category": c, "turns": [f"say {n}", "more"]} for n in range(10) for c in MT_BENCH],
    "humaneval": [{"task_id": f"H/{n}", "prompt": f"say {n}", "entry_point": "f"} for n in range(164)],
    "gsm8k": [{"question": f"say {n}", "answer": "1"} for n in range(1319)],
    "spec-bench": [{"question_id": n, "category": c, "turns": ["say 1"]} for c in TASKS for n in range(80)]
    + [{"question_id": n, "category": c, "turns": ["say 1", "2"]} for c in MT_BENCH for n in range(10)],
    "speed-bench": [
        {"question_id": str(n), "category": c, "sub_category": "x", "turns": ["say 1"], "multiturn": False}
        for c in SPEED_BENCH for n in range(80)
    ],
}  # fmt: skip


def write_suite(file: Path, name: str) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in SUITES[name]))
    return file


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_gives_its_categories_by_place_and_its_definition(pair, heads, run, tmp_path, name):
    file = write_suite(tmp_path / "suite.jsonl", name)
    common = ["evaluate", heads["eagle3"], "--target", pair.target, "--osl", "8", "--steps", "3", "--threads", "1"]
    names = {"humaneval": ["humaneval"], "gsm8k": ["gsm8k"], "mt-bench": MT_BENCH, "speed-bench": SPEED_BENCH}
    expected = names.get(name, [*TASKS, "multi-turn"])
    said = run(*common, "--num-samples", str(len(expected)), "--json", "--suite", name, str(file))
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert sorted(found["categories"]) == sorted(expected)
    turns = 2 if name == "mt-bench" else 1
    assert {each["prompts"] for key, each in found["categories"].items() if key != "multi-turn"} == {turns}
    for each in (found, *found["categories"].values()):
        assert each["acceptance_length"] == each["tokens"] / each["forwards"]
        product = 1.0
        for joint, given in zip(each["joint"], each["by_position"], strict=True):
            product *= given  # drafts near the end of an answer are shorter, so places are tried less often
            assert joint <= product + 1e-9
        assert sum(each["joint"]) == pytest.approx(each["accepted"] / max(each["drafts"], 1))
    assert found["definition"].startswith(f"{name}: {len(SUITES[name])} prompts as user turns")
    assert f"only {len(expected)} prompts" in found["definition"]
    assert "answers of at most 8 tokens" in found["definition"]
    assert "forwards of the target" in found["definition"]


def test_a_table_shows_the_figures_of_all_categories(pair, heads, run, tmp_path):
    file = write_suite(tmp_path / "suite.jsonl", "mt-bench")
    common = ["evaluate", heads["eagle3"], "--target", pair.target, "--osl", "4", "--steps", "2", "--threads", "1"]
    said = run(*common, "--num-samples", "8", "--suite", "mt-bench", "--data", str(file))
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert [line.split(":")[0].strip() for line in lines[-10:-1]] == [*sorted(MT_BENCH), "all"]
    assert "Other evaluators differ" in lines[-1]


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("mt-bench", "gsm8k", "expected question_id, category, turns as in the file of mt-bench"),
        ("mt-bench", "spec-bench", "category 'translation', expected one of mt-bench"),
        ("mt-bench", "speed-bench", "without sub_category"),
        ("spec-bench", "mt-bench", "80 prompts, expected the 480 of spec-bench"),
        ("speed-bench", "mt-bench", "expected question_id, category, turns, sub_category"),
        ("humaneval", "gsm8k", "expected task_id, prompt, entry_point"),
    ],
)
def test_a_file_of_another_benchmark_is_refused(pair, heads, run, tmp_path, name, other, message):
    file = write_suite(tmp_path / "suite.jsonl", other)
    said = run("evaluate", heads["eagle3"], "--target", pair.target, "--suite", name, str(file))
    assert (said.code, len(said.err.strip().splitlines())) == (2, 1)
    assert message in said.err


def test_suites_without_a_file_or_with_placeholders_are_refused(pair, heads, run, tmp_path):
    common = ["evaluate", heads["eagle3"], "--target", pair.target]
    assert "expected --suite mt-bench FILE" in run(*common, "--suite", "mt-bench").err
    assert "expected one of mt-bench, humaneval" in run(*common, "--suite", "mtbench", "f").err
    assert "leave one of them out" in run(*common, "--suite", "mt-bench", "f", "--data", "g").err
    assert "expected JSON lines" in run(*common, "--suite", "speed-bench", "test.parquet").err
    rows = [{**row, "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM X"]} for row in SUITES["speed-bench"]]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "are placeholders" in run(*common, "--suite", "speed-bench", str(tmp_path / "s.jsonl")).err
