"""Draft models distilled from a target: the loss against transformers, answers of their own, whole runs, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from sametoken import LLM, CheckpointError, ConfigError, DraftMismatchError, SamplingParams
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.tensors import read_tensors
from sametoken.checkpoint.write import write_model
from sametoken.heads.draft_model.objective import DraftObjective, TrainableDraft
from sametoken.heads.draft_model.on_policy import rewrite, sample
from sametoken.learning.batch import Batch, guess_weights
from sametoken.learning.target import Features
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.train.settings import LossSettings
from sametoken.train.targets import read_outer
from tiny_models import VOCAB, save
from training_checks import log_of, train_tiny, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl")


def distil(target: str, data: Path, output: Path, **chosen: Any) -> Any:
    return train_tiny(target, data, output, mode="draft", dtype="float32", **chosen)


def plain_decoder(directory: Path) -> Decoder:
    """A decoder whose linears are not packed."""
    config = ModelConfig.from_hf(read_config(directory))
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32)
    load_parameters(decoder, read_tensors(directory), rules_for(config), torch.float32, "cpu", pack=False)
    return decoder


def documents(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(0, VOCAB, (length,), generator=dice) for length in lengths]
    return [(row, torch.arange(len(row)) >= len(row) // 3) for row in rows]


@pytest.mark.parametrize("family", ["llama-3.2", "qwen-3", "mistral"])
def test_loss_and_gradients_are_those_of_transformers(pair, tmp_path, family):
    oracle = save(family, tmp_path / "draft", seed=3)
    decoder = plain_decoder(tmp_path / "draft")
    outer = read_outer(Path(pair.target), torch.float32, CPU)
    batch = Batch.of(documents(17, 11, 23))
    rows = [row.unsqueeze(0) for row in torch.split(batch.tokens, list(batch.lengths))]
    with torch.no_grad():
        states = [pair.oracle.model(input_ids=row).last_hidden_state[0] for row in rows]
    for recompute in (False, True):
        draft = TrainableDraft(decoder, {}, tmp_path)
        student = DraftObjective(draft, outer, LossSettings(), torch.float32, recompute=recompute)
        goal = guess_weights(batch, 1, 0.8, per_document=True)
        student.zero_grad()
        features = Features(torch.cat(states)[:, :0], torch.cat(states))
        loss, report = student(batch, features, goal.weights / goal.total)
        loss.backward()

        oracle.zero_grad()
        wanted = []
        masks = torch.split(batch.mask, list(batch.lengths))
        for row, mask, state in zip(rows, masks, states, strict=True):
            p = pair.oracle.lm_head(state).softmax(-1).detach()
            q = oracle(input_ids=row).logits[0].log_softmax(-1)
            each = F.kl_div(q, p, reduction="none").sum(-1)[:-1]
            wanted.append(each[mask[1:] & (torch.arange(len(each)) > 0)].mean())
        expected = torch.stack(wanted).mean()
        expected.backward()
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
        embedded = oracle.get_input_embeddings().weight.grad
        torch.testing.assert_close(decoder.embed.weight.grad, embedded, atol=1e-5, rtol=1e-3)
        down = oracle.model.layers[0].mlp.down_proj.weight.grad
        torch.testing.assert_close(decoder.blocks[0].down.weight.grad, down, atol=1e-5, rtol=1e-3)
        assert report.counted.item() == sum(int(m[2:].sum()) for m in masks)


@pytest.mark.parametrize("family", ["llama-biases", "llama-3.2", "mistral", "phi-3-short", "qwen-2", "qwen-3-biases"])
def test_a_written_model_is_what_transformers_wrote(family, tmp_path):
    model = save(family, tmp_path / "first")
    source = tmp_path / "first"
    write_model(plain_decoder(source), tmp_path / "again", read_config(source), source, torch.float32)
    first, again = load_file(source / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(first)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    tokens = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_run_leaves_a_draft_that_transformers_and_the_engine_load(pair, data, tmp_path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64, "rope_theta": 500.0}
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    chosen = {"draft_config": str(tmp_path / "sizes.json"), "max_steps": 30, "num_epochs": 100, "save_steps": 30}
    outcome = distil(pair.target, data, tmp_path / "out", gradient_checkpointing=True, lr=1e-2, **chosen)
    log = log_of(tmp_path / "out")
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert outcome.head == tmp_path / "out" / "draft"
    written = read_config(outcome.head)
    assert {name: written[name] for name in sizes} == sizes
    loaded = transformers.AutoModelForCausalLM.from_pretrained(outcome.head)
    tokens = torch.arange(9).unsqueeze(0)
    ours = load_decoder(outcome.head, torch.float32, "cpu")
    assert loaded.config.num_hidden_layers == len(ours.blocks) == 2
    assert loaded(tokens).logits.dtype == torch.float32
    prompts = ["say 1", "say 2"]
    greedy = SamplingParams(temperature=0, max_tokens=16)
    plain = LLM(pair.target, None).generate(prompts, greedy)
    drafted = LLM(pair.target, str(outcome.head), {"adaptive": False}).generate(prompts, greedy)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert all(each.speculation.drafted for each in drafted)
    going_on = distil(pair.target, data, tmp_path / "on", init_from=str(outcome.head), max_steps=2)
    assert log_of(tmp_path / "on")[0]["loss"] < 0.9 * log[0]["loss"]
    assert read_config(going_on.head)["rope_theta"] == 500.0


def test_runs_with_answers_of_the_drafts_own_resume_bit_for_bit(pair, data, tmp_path):
    chosen = {"on_policy": 0.5, "num_epochs": 5, "train_bs": 2, "max_steps": 4, "save_steps": 2}
    distil(pair.target, data, tmp_path / "whole", **chosen)

    class StopError(Exception):
        pass

    def tell(line: str) -> None:
        if line.startswith("step 4/"):
            raise StopError

    with pytest.raises(StopError):
        distil(pair.target, data, tmp_path / "stopped", tell=tell, **chosen)
    distil(pair.target, data, tmp_path / "stopped", **chosen)
    whole, stopped = (load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(value, stopped[name]) for name, value in whole.items())


def test_the_best_draft_by_held_out_evaluation_is_kept(pair, data, tmp_path):
    evaluated: list[Path] = []

    def evaluator(draft: Path) -> float:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in draft.iterdir()}
        evaluated.append(draft)
        return (1.5, 2.5, 1.0)[len(evaluated) - 1]

    chosen = {"max_steps": 3, "save_steps": 1, "save_total_limit": 9, "eval_data": "unread", "eval_steps": 1}
    outcome = distil(pair.target, data, tmp_path / "out", evaluator=evaluator, **chosen)
    assert outcome.best == 2.5
    best = load_file(tmp_path / "out" / "checkpoint-2" / "model.safetensors")["decoder.norm.weight"]
    assert torch.equal(load_file(outcome.head / "model.safetensors")["model.norm.weight"], best)


def test_answers_are_drawn_as_transformers_would(tmp_path):
    """With scores far apart a draw is the best token, which transformers finds too."""
    model = save("llama-2", tmp_path, seed=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(1000)
    model.save_pretrained(tmp_path)
    prompts = [tokens for tokens, _ in documents(5, 40, 12)]
    counts = [7, 3, 40]
    found = sample(plain_decoder(tmp_path), prompts, counts, (), torch.arange(3))
    for prompt, count, answer in zip(prompts, counts, found, strict=True):
        expected = model.generate(
            prompt.unsqueeze(0), do_sample=False, max_new_tokens=count, use_cache=False, pad_token_id=0
        )
        assert answer.tolist() == expected[0, len(prompt) :].tolist()
    stop = found[2][4].item()
    shorter = sample(plain_decoder(tmp_path), prompts, counts, (stop,), torch.arange(3))
    first = found[2].tolist().index(stop)
    assert shorter[2].tolist() == found[2][: first + 1].tolist()


def test_draws_follow_the_models_distribution(tmp_path):
    save("llama-2", tmp_path)
    decoder = plain_decoder(tmp_path)
    prompt = torch.arange(6)
    drawn = sample(decoder, [prompt] * 1000, [1] * 1000, (), torch.arange(1000))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        chances = model(prompt.unsqueeze(0)).logits[0, -1].softmax(-1)
    shares = torch.bincount(torch.cat(drawn), minlength=VOCAB) / 1000
    assert (shares - chances).abs().max() < 4 * (0.25 / 1000) ** 0.5


def test_rewriting_keeps_what_stands_before_the_last_answer(tmp_path):
    save("llama-2", tmp_path)
    decoder = plain_decoder(tmp_path)
    (long, _), (short, _), (silent, _) = documents(20, 9, 6)
    two = torch.zeros(20, dtype=torch.bool)
    two[[4, 5, 6, 12, 13, 14, 15]] = True  # two answers and a tail
    all_of_it, seeds = torch.ones(9, dtype=torch.bool), torch.arange(3)
    batch = Batch.of([(long, two), (short, all_of_it), (silent, torch.zeros(6, dtype=torch.bool))], seeds=seeds)
    new = rewrite(decoder, batch, 1.0, ())
    assert new.lengths == (16, 9, 6)
    assert torch.equal(new.tokens[:12], long[:12])
    assert not torch.equal(new.tokens[12:16], long[12:16])
    assert torch.equal(new.mask[:16], two[:16])
    assert torch.equal(new.tokens[16:], torch.cat([short, silent]))  # nothing to go on from, nothing to answer
    assert rewrite(decoder, batch, 0.0, ()) is batch
    every = range(VOCAB)
    alone = rewrite(decoder, Batch.of([(long, two)], seeds=seeds[:1]), 1.0, ())
    assert torch.equal(alone.tokens, new.tokens[:16])  # whatever is beside it
    ended = rewrite(decoder, batch, 1.0, every)
    assert ended.lengths == (13, 9, 6)
    assert torch.equal(ended.tokens[:13], new.tokens[:13])


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"mode": "eagle3", "on_policy": 0.5}, "--on-policy is for --mode draft"),
        ({"on_policy": 0.5, "loss": "hard"}, "its own words"),
        ({"on_policy": 0.5, "fsdp": True}, "leave --fsdp out"),
        ({"on_policy": 1.5}, "on_policy = 1.5"),
        ({"draft_vocab_size": 12}, "leave --draft-vocab-size out"),
        ({"mode": "medusa", "draft_config": "x"}, "draft_config is for mode draft"),
        ({"draft_config": "absent.json"}, "No such file"),
        ({"sizes": "{"}, "not JSON"),
        ({"sizes": "[]"}, "holds a list"),
        ({"sizes": '{"hidden_sise": 8}'}, "did you mean 'hidden_size'"),
        ({"sizes": '{"num_attention_heads": 3, "num_key_value_heads": 2}'}, "expected a multiple"),
        ({"sizes": '{"hidden_size": "wide"}'}, "'hidden_size'"),
        ({"sizes": '{"hidden_size": 32}', "init_from": "DRAFT"}, "leave draft_config out"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(pair, data, tmp_path, chosen, message):
    chosen = {name: pair.draft if value == "DRAFT" else value for name, value in chosen.items()}
    if (sizes := chosen.pop("sizes", None)) is not None:
        (tmp_path / "sizes.json").write_text(sizes)
        chosen["draft_config"] = str(tmp_path / "sizes.json")
    with pytest.raises((ConfigError, CheckpointError), match=message):
        train_tiny(pair.target, data, tmp_path / "out", **{"mode": "draft", **chosen})


def test_models_that_do_not_fit_and_full_places_are_refused(pair, data, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=90, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(DraftMismatchError, match="has 90 tokens, expected the target's 128"):
        distil(pair.target, data, tmp_path / "out", init_from=str(tmp_path / "other"))
    target = Path(pair.target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    decoder = plain_decoder(target)
    with pytest.raises(CheckpointError, match=r"holds thesis\.txt"):
        write_model(decoder, tmp_path / "full", read_config(target), target, torch.float32)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    for _ in range(2):  # what this wrote it may replace
        write_model(decoder, tmp_path / "own", read_config(target), target, torch.bfloat16)
    assert read_config(tmp_path / "own")["dtype"] == "bfloat16"
    assert not list(tmp_path.glob(".written-*"))
