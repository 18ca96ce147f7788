"""Hidden states that Model Optimizer's scripts dump are read in place, and train as the target itself does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import Pair
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.train.dataset.preparation import tokenise
from training_checks import log_of, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")
TAPS = (0, 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", 8)


def dump(pair: Pair, data: Path, place: Path, **changes: Any) -> Path:
    """Files as compute_hidden_states_hf.py writes them: what transformers returns, one file a conversation."""
    place.mkdir()
    for found in tokenise([data], load_tokenizer(Path(pair.target))):
        ids = torch.tensor(found.masked.tokens)
        with torch.no_grad():
            states = pair.oracle(ids[None], output_hidden_states=True).hidden_states
        aux = torch.cat([states[tap + 1].squeeze(0) for tap in TAPS], dim=-1)
        content = {
            "input_ids": ids, "hidden_states": states[-1].squeeze(0), "aux_hidden_states": aux,
            "conversation_id": found.id, "loss_mask": torch.tensor(found.masked.mask).long(),
        }  # fmt: skip
        content |= {name: change(content) for name, change in changes.items()}
        torch.save({key: value for key, value in content.items() if value is not None}, place / f"{found.id}.pt")
    return place


def words(pair: Pair, data: Path, out: Path, *more: str) -> list[str]:
    given = [
        "--max-steps=4",
        "--logging-steps=1",
        "--training-seq-len=128",
        "--threads=1",
        "--dtype=float32",
        "--output-dir",
        str(out),
    ]
    return ["train", pair.target, "--data", str(data), "--taps", ",".join(map(str, TAPS)), *given, *more]


def losses(output: Path) -> list[float]:
    return [entry["loss"] for entry in log_of(output) if "loss" in entry]


@pytest.mark.parametrize("option", ["--answer-only-loss", "--all-tokens"])
def test_dumps_train_as_the_target_does(pair, data, tmp_path, run, option):
    done = run(*words(pair, dump(pair, data, tmp_path / "dumps"), tmp_path / "offline", option))
    assert done.code == 0, done.err
    assert run(*words(pair, data, tmp_path / "online", option)).code == 0
    offline, online = (losses(tmp_path / name) for name in ("offline", "online"))
    assert len(offline) == 4
    assert offline == pytest.approx(online, rel=1e-3)
    other = "--all-tokens" if option == "--answer-only-loss" else "--answer-only-loss"
    assert run(*words(pair, data, tmp_path / "other", other)).code == 0
    assert losses(tmp_path / "other") != pytest.approx(offline, rel=1e-2)


def test_other_modes_vocabularies_and_resumption(pair, data, tmp_path, run):
    place = dump(pair, data, tmp_path / "dumps")
    common = ["train", pair.target, "--data", str(place), "--threads=1", "--max-steps=2", "--output-dir"]
    assert run(*common, str(tmp_path / "medusa"), "--mode", "medusa").code == 0
    reduced = words(pair, place, tmp_path / "small", "--draft-vocab-size=20", "--fill-vocabulary")
    assert run(*reduced).code == 0
    assert json.loads((tmp_path / "small" / "head" / "config.json").read_text())["draft_vocab_size"] == 20
    assert run(*reduced).code == 0  # nothing is left to do
    (place / "0.pt").touch()
    assert "found data_sha256" in run(*reduced).err


def test_states_before_the_norm_are_normed(pair, data, tmp_path, run):
    """vLLM's states are taken before the final norm, with a mark in newer dumps."""
    norm = pair.oracle.model.norm
    entered: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda module, given: entered.append(given[0].squeeze(0).detach()))
    early = {"hidden_states": lambda content: entered[-1]}
    marked = dump(pair, data, tmp_path / "marked", hidden_states_prenorm=lambda content: True, **early)
    plain = dump(pair, data, tmp_path / "plain", **early)
    handle.remove()
    usual = dump(pair, data, tmp_path / "usual")
    found = []
    for place in (marked, plain, usual):
        done = run(*words(pair, place, tmp_path / f"{place.name}-out"))
        assert done.code == 0, done.err
        found.append(losses(tmp_path / f"{place.name}-out"))
    assert found[0] == pytest.approx(found[2], rel=1e-3)
    assert found[1] == pytest.approx(found[2], rel=1e-3)
    kept = dump(pair, data, tmp_path / "kept", hidden_states_prenorm=lambda content: True)
    assert run(*words(pair, kept, tmp_path / "kept-out")).code == 0
    assert losses(tmp_path / "kept-out") != pytest.approx(found[2], rel=1e-3)  # normed twice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": lambda c: None}, "no loss_mask for"),
        ({"hidden_states": lambda c: None}, "no tensor hidden_states, expected input_ids"),
        ({"aux_hidden_states": lambda c: c["aux_hidden_states"][:, :-8]}, "aux_hidden_states has the shape"),
        ({"aux_hidden_states": lambda c: torch.empty(0)}, "aux_hidden_states has the shape (0,)"),
        ({"hidden_states": lambda c: c["hidden_states"][:, :8]}, "hidden_states has the shape"),
        ({"hidden_states": lambda c: c["hidden_states"][:-1]}, "hidden_states has the shape"),
        ({"input_ids": lambda c: c["input_ids"] + 9999}, "its tokenizer belongs to another model"),
        ({"input_ids": lambda c: c["input_ids"].float()}, "input_ids are numbers of float32"),
        ({"hidden_states": lambda c: c["hidden_states"] * float("nan")}, "hold NaN or Inf"),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)
def test_wrong_dumps_are_refused(pair, data, tmp_path, run, changes, message):
    done = run(*words(pair, dump(pair, data, tmp_path / "dumps", **changes), tmp_path / "out"))
    assert done.code == 2
    assert message in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error")]) == 1


def test_damaged_files_and_code_are_refused(pair, data, tmp_path, run):
    place = dump(pair, data, tmp_path / "dumps")
    first = sorted(place.iterdir())[0]
    whole = first.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no dump"):
        first.write_bytes(content)
        done = run(*words(pair, place, tmp_path / "out"))
        assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
        assert f"{first}: not a dump of hidden states" in done.err
    torch.save({"input_ids": Path("/")}, first)  # an object, which would need code
    assert "not a dump of hidden states" in run(*words(pair, place, tmp_path / "out")).err
    first.write_bytes(whole)
    assert "--no-end-of-turn has no use" in run(*words(pair, place, tmp_path / "out", "--no-end-of-turn")).err
    assert "expected (" in run("train", pair.target, "--data", str(place), "--taps=0,1,2").err
