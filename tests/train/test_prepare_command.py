"""`sametoken prepare` as a user meets it: what it prints and writes, how processes share the work, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prepared import write

from chat_templates import STOCK
from cli_checks import Pair
from sametoken.commands.prepare import coloured
from sametoken.train.dataset.masks import mask_conversation
from sametoken.train.dataset.prepared import Prepared
from speakers import speaker, turns


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"id": "first", "messages": turns("Hi", "fox", "And?", "a dog")}, {"id": "second", "text": "The dog"}]
    return str(write(tmp_path / "data.jsonl", rows))


def prepare(run: Any, pair: Pair, data: str, *options: str) -> Any:
    return run("prepare", pair.target, "--data", data, "--dtype", "float32", *options)


def test_summary_and_samples(run: Any, pair: Pair, data: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    answer = prepare(run, pair, data, "--output", out, "--draft-vocab-size", "10", "--show", "1")
    assert answer.code == 0, answer.err
    prepared = Prepared.open(out)
    counts = prepared.manifest.counts
    assert (prepared.manifest.origin.max_len, counts.samples) == (128, 2)  # the model's context
    said = prepared[0].tokens[prepared[0].mask]
    assert len(said) == len(" fox a dog")
    assert f"{counts.samples} samples of {counts.tokens} tokens for {pair.target}" in answer.out
    assert f"{counts.masked} tokens ({100 * counts.masked / counts.tokens:.1f} %)" in answer.out
    assert f"10 tokens, {100 * (counts.coverage or 0):.2f} % of what is said" in answer.out
    assert "user: Hi<unk>assistant: fox<unk>user: And?" in answer.out
    assert "The dog" not in answer.out
    assert "warning: 1 samples have an answer that no special token ends" in answer.out


def test_samples_alone_write_nothing(run: Any, pair: Pair, data: str, tmp_path: Path) -> None:
    answer = prepare(run, pair, data, "--show", "9", "--all-tokens")
    assert answer.code == 0
    assert "The dog" in answer.out
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize(
    ("option", "every"),
    [
        ("--no-answer-only-loss", True),
        ("--no_answer_only_loss", True),
        ("--answer-only-loss", False),
        ("--json", False),
    ],
)
def test_the_other_spelling_of_all_tokens(
    run: Any, pair: Pair, data: str, tmp_path: Path, option: str, every: bool
) -> None:
    answer = prepare(run, pair, data, "--output", str(tmp_path / "out"), option)
    assert answer.code == 0, answer.err
    prepared = Prepared.open(tmp_path / "out")
    assert prepared.manifest.origin.all_tokens == every
    assert bool(prepared[0].mask.all()) == every
    trained = run(
        "train", pair.target, "--data", data, "--dry-run", "--json", *([option] if option != "--json" else [])
    )
    assert json.loads(trained.out)["settings"]["all_tokens"]["value"] == every


def test_colours_are_the_mask() -> None:
    tokenizer = speaker(STOCK["chatml"], ends=("<|im_end|>",))
    masked = mask_conversation(tokenizer, turns("Hi", "fox", "And?", "the dog"))
    text = coloured(tokenizer, masked, len(masked.tokens))
    assert text.plain == tokenizer.decode(masked.tokens, skip_special_tokens=False)
    assert [text.plain[s.start : s.end] for s in text.spans if s.style == "green"] == [
        "fox<|im_end|>", "the dog<|im_end|>"
    ]  # fmt: skip
    assert {str(span.style) for span in text.spans} == {"green", "dim"}
    cut = coloured(tokenizer, masked, 3)
    assert cut.plain == text.plain
    assert "".join(text.plain[s.start : s.end] for s in cut.spans if "strike" in str(s.style)) == tokenizer.decode(
        masked.tokens[3:], skip_special_tokens=False
    )


def test_hidden_states_by_two_processes(
    run: Any, pair: Pair, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    given = ("--output", str(out), "--hidden-states", "--taps", "0,2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, written in (("1", 0), ("0", 1), ("0", 0)):  # a single shard, which is the first process's
        monkeypatch.setenv("RANK", rank)
        answer = prepare(run, pair, data, *given)
        assert answer.code == 0, answer.err
        assert "blocks 0, 2 and after the last norm, bfloat16, " in answer.out
        assert f"{written} of {1 - int(rank)} shards written now, part {rank} of 2" in answer.out
    found = Prepared.open(out).features(1)
    assert found is not None
    assert (found.taps.shape[1], found.last.shape[1], found.last.dtype) == (128, 64, torch.bfloat16)
    other = prepare(run, pair, data, *given, "--hidden-dtype", "fp8")
    assert other.code == 2
    assert "hidden/manifest.json: found dtype bfloat16, expected fp8" in other.err


def test_templates_that_show_the_past_otherwise_are_told(run: Any, pair: Pair, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(pair.target).iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(STOCK["mistral"])
    rows = [{"messages": turns("Hi", "fox", system="Be brief.")}, {"messages": turns("Hi", "fox")}]
    data = write(tmp_path / "data.jsonl", rows)
    answer = run("prepare", str(model), "--data", str(data), "--output", str(tmp_path / "out"))
    assert "warning: 1 samples are not what a server would send" in answer.out


REFUSED = [
    (["--output", "OUT"], "got no --data"),
    (["--data", "DATA"], "got no --output"),
    (["--data", "DATA", "--show", "1", "--hidden-states"], "--hidden-states needs a place"),
    (["--data", "DATA", "--output", "OUT", "--show", "-1"], "--show -1: expected at least 0"),
    (["--data", "DATA", "--output", "OUT", "--max-len", "0"], "--max-len 0: expected at least 1"),
    (["--data", "DATA", "--output", "OUT", "--max-len", "129"], "--max-len 129: the model was made for 128 positions"),
    (["--data", "DATA", "--output", "OUT", "--fill-vocabulary"], "no use without --draft-vocab-size"),
    (["--data", "DATA", "--output", "OUT", "--chat-template-kwargs", "[1]"], "expected an object such as"),
    (["--data", "DATA", "--output", "OUT", "--chat-template-kwargs", "{"], "expected an object such as"),
    (["--data", "DATA", "--output", "OUT", "--draft-vocab-size", "99"], "different tokens occur in what the assistant"),
    (["--data", "DATA", "--output", "OUT", "--threads", "0"], "--threads 0: expected 1 to 1024"),
    (["--data", "DATA", "--output", "OUT", "--hidden-states"], "at least 7 for the usual taps"),
    (["--data", "DATA", "--output", "OUT", "--hidden-states", "--taps", "3"], "different blocks from 0 to 2"),
    (["--data", "DATA", "--output", "OUT", "--hidden-states", "--taps", "1", "--shard", "2/2"], "--shard '2/2'"),
    (["--data", "DATA", "--output", "OUT", "--hidden-states", "--taps", "1", "--hidden-dtype", "fp4"], "'fp4'"),
    (
        ["--data", "DATA", "--output", "OUT", "--hidden-states", "--taps", "1", "--budget", "1kB"],
        "the budget is 1.0 kB",
    ),
    (["--data", "DATA", "--output", "OUT", "--hidden-states", "--taps", "1", "--budget", "x"], "--budget 'x'"),
    (["--data", "MISSING", "--output", "OUT"], "No such file"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals(run: Any, pair: Pair, data: str, tmp_path: Path, arguments: list[str], words: str) -> None:
    places = {"DATA": data, "OUT": str(tmp_path / "out"), "MISSING": str(tmp_path / "missing")}
    answer = run("prepare", pair.target, *(places.get(argument, argument) for argument in arguments))
    assert answer.code == 2
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "out" / "hidden").exists()


def test_another_model_or_other_data_are_refused(run: Any, pair: Pair, data: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert prepare(run, pair, data, "--output", out).code == 0
    answer = run("prepare", pair.draft, "--data", data, "--output", out)
    assert (answer.code, "manifest.json: found target_digest" in answer.err) == (2, True)
    other = write(tmp_path / "other.jsonl", [{"messages": turns("Hi", "fox")}])
    answer = prepare(run, pair, str(other), "--output", out)
    assert (answer.code, "manifest.json: found data_sha256" in answer.err) == (2, True)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["samples"] == 2


def test_conversations_that_share_text_with_held_out_prompts_are_left_out(
    run: Any, pair: Pair, data: str, tmp_path: Path
) -> None:
    held_out = str(write(tmp_path / "held-out.jsonl", [{"id": "x", "messages": turns("hi!", "other")}]))
    out = str(tmp_path / "out")
    answer = prepare(run, pair, data, "--output", out, "--exclude", held_out)
    assert answer.code == 0, answer.err
    assert "left out, because they share text with held-out prompts: 1 conversations" in answer.out
    assert [sample.id for sample in Prepared.open(out)] == ["second"]
    refused = prepare(run, pair, data, "--output", out)
    assert refused.code == 2
    assert "exclude_sha256" in refused.err
    everything = str(write(tmp_path / "more.jsonl", [{"id": "y", "messages": turns("Hi", "fox")}]))
    none = prepare(run, pair, everything, "--output", str(tmp_path / "none"), "--exclude", held_out)
    assert none.code == 2
    assert "all 1 share text with the prompts of --exclude" in none.err
