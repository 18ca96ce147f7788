"""Heads trained beside a transformers model, by transformers.Trainer and by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sametoken.train as sametoken_train
from sametoken import LLM, CheckpointError, ConfigError, DataError, SamplingParams, UnsupportedModelError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.modelopt import ARCHITECTURE, LOSS, NESTED, ONLY, SWITCHES
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.train.hf.base import read
from tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")
TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
FAMILIES = ("llama-2", "llama-3.1", "llama-3.2", "mistral", "phi-3-short", "qwen-1.5", "qwen-2.5-yarn", "qwen-3")
MODES: dict[str, dict[str, Any]] = {
    "eagle3": TAPS,
    "eagle1": {},
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 2},
}


def llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    common = {"vocab_size": 64, "num_hidden_layers": 7, "max_position_embeddings": 64, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**{**common, **sizes, **options}))


def tokens_of(rows: int = 3, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.rows = tokens_of(9)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.rows[index].clone()
        labels[:5] = -100
        return {"input_ids": self.rows[index], "labels": labels, "attention_mask": torch.ones_like(labels)}


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    common = {"max_steps": 3, "save_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "report_to": []}
    return TrainingArguments(str(directory), use_cpu=True, per_device_train_batch_size=2, **{**common, **options})


def convert(model: Any, mode: str, config: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(1)
    return sametoken_train.convert(model, [(mode, config)], **options)


def head_of(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.startswith("sametoken.")}


@pytest.mark.filterwarnings("ignore:mode 'eagle' means eagle3:UserWarning")
@pytest.mark.parametrize("mode", ["medusa", "eagle"])
def test_the_workflow_of_modelopts_example_runs_and_goes_on_where_it_stopped(mode, tmp_path):
    """The script of its documentation with another import, then the same in two runs."""
    llama().save_pretrained(tmp_path / "model")

    def script(output: Path, checkpoint: str | None) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        if mode == "medusa":
            config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
        else:
            config = {
                "eagle_num_layers": 1,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": False,
            }
        transformers.set_seed(3)
        sametoken_train.convert(model, [(mode, config)])
        options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": checkpoint is None}
        trainer = Trainer(model=model, args=arguments(output, **options), train_dataset=Data())
        trainer._move_model_to_device(model, trainer.args.device)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_state()
        trainer.save_model(str(output / "done"))
        return trainer

    whole = script(tmp_path / "whole", None)
    resumed = script(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-1"))
    assert whole.state.global_step == resumed.state.global_step == 3
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[1:] == [entry["loss"] for entry in resumed.state.log_history if "loss" in entry][1:]
    trained, again = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in trained.items())
    before = llama().state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in before.items())
    files = load_file(tmp_path / "whole" / "checkpoint-3" / "model.safetensors")
    assert set(files) == set(head_of(whole.model))  # nothing of the model itself
    assert not (tmp_path / "whole" / "done" / "config.json").exists()

    reloaded = sametoken_train.restore(llama(), tmp_path / "whole" / "done")
    assert all(torch.equal(value, trained[name]) for name, value in reloaded.state_dict().items())
    reloaded.eval()
    batch = {name: value.unsqueeze(0) for name, value in Data()[0].items()}
    assert torch.equal(reloaded(**batch).loss, whole.model.eval()(**batch).loss)


@pytest.mark.cover
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_the_hidden_states_that_transformers_reports_and_learns(family, mode):
    model = build(family)
    own = type(model)
    tokens = tokens_of()
    oracle = model(input_ids=tokens, output_hidden_states=True)
    found = read(model, tokens, None, (0, 1))
    assert torch.equal(found.taps, torch.cat(oracle.hidden_states[1:3], dim=-1))
    assert torch.equal(found.last, oracle.hidden_states[-1])
    before = copy.deepcopy(model.state_dict())
    assert convert(model, mode, MODES[mode]) is model
    assert isinstance(model, own)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for _ in range(4):
        outputs = model(input_ids=tokens, labels=tokens)
        outputs.loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(outputs.loss.item())
    assert losses[-1] < losses[0]
    assert "logits" not in outputs
    model.eval()
    judged = model(input_ids=tokens, labels=tokens)
    assert torch.allclose(judged.logits, oracle.logits, atol=1e-5)
    assert judged.accuracies.shape == (model.sametoken.steps,)
    assert judged.acceptance_length.item() == pytest.approx(1 + judged.accuracies.cumprod(0).sum().item())
    assert torch.equal(model(input_ids=tokens).logits, oracle.logits)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_noise_disturbs_what_eagle1_reads_in_training_only():
    tokens = tokens_of()

    def loss(width: float, *, training: bool) -> float:
        model = convert(llama(num_hidden_layers=3), "eagle1", {"noise": width}).train(training)
        return model(input_ids=tokens, labels=tokens).loss.item()

    assert loss(2.0, training=True) != loss(0.0, training=True)
    assert loss(2.0, training=False) == loss(0.0, training=False)


@pytest.mark.cover
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(mode, side):
    model = convert(llama(num_hidden_layers=3), mode, MODES[mode]).eval()
    rows = [tokens_of(1, length, seed=length)[0] for length in (9, 15, 12)]
    alone = [model(input_ids=row.unsqueeze(0), labels=row.unsqueeze(0)).loss for row in rows]
    tokens, mask = torch.zeros(4, 15, dtype=torch.int64), torch.zeros(4, 15, dtype=torch.int64)
    labels = torch.full((4, 15), 7)  # of padding, which nobody reads
    for i, row in enumerate(rows):
        place = slice(15 - len(row), 15) if side == "left" else slice(0, len(row))
        tokens[i, place] = labels[i, place] = row
        mask[i, place] = 1
    together = model(input_ids=tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(together.loss, torch.stack(alone).mean())


def test_a_batch_without_anything_to_guess_has_no_loss_and_no_gradient():
    model = convert(llama(num_hidden_layers=3), "eagle3", TAPS).train()
    tokens = tokens_of()
    loss = model(input_ids=tokens, labels=torch.full_like(tokens, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_narrow_model_and_autocast_keep_weights_in_float32():
    tokens = tokens_of()
    for model, context in (
        (llama(num_hidden_layers=3).bfloat16(), torch.autocast("cpu", enabled=False)),
        (llama(num_hidden_layers=3), torch.autocast("cpu", torch.bfloat16)),
    ):
        convert(model, "eagle3", TAPS).train()
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert {parameter.dtype for parameter in trained} == {parameter.grad.dtype for parameter in trained}
        assert {parameter.dtype for parameter in trained} == {torch.float32}
        assert model.sametoken.dtype == torch.bfloat16


def test_data_parallelism_of_torch_takes_the_model(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = convert(llama(num_hidden_layers=3), "eagle3", TAPS).train()
        wrapped = nn.parallel.DistributedDataParallel(model)
        tokens = tokens_of()
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        # Its reducer would be the last to let go of the group, and wait for the group's threads while it holds Python's
        # lock, which they may wait for.
        del loss, wrapped
    finally:
        torch.distributed.destroy_process_group()


def test_the_base_is_saved_on_request_and_stays_an_ordinary_checkpoint(tmp_path):
    model = convert(llama(num_hidden_layers=3), "eagle3", TAPS, save_base=True).train()
    trainer = Trainer(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=Data())
    trainer.train()
    place = tmp_path / "checkpoint-1"
    plain = transformers.AutoModelForCausalLM.from_pretrained(place)
    before = llama(num_hidden_layers=3).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    written = json.loads((place / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert not [name for name in written if "eagle" in name or "sametoken" in name]
    again = sametoken_train.restore(plain, place)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    fresh = convert(llama(num_hidden_layers=3), "eagle3", TAPS)
    Trainer(model=fresh, args=arguments(tmp_path, max_steps=1), train_dataset=Data()).train(str(place))
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in head_of(model).items())


def test_the_saved_head_is_served_without_changing_a_token(pair, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    layers = model.config.num_hidden_layers
    taps = {"eagle_aux_hidden_state_layer_ids": list(range(min(3, layers)))}
    convert(model, "eagle3", {**taps, "norm_output": True, "eagle_ttt_steps": 2}).save_pretrained(tmp_path)
    prompts = [[1, 2, 3, 4], [5, 6]]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(pair.target, None).generate(prompts, greedy)
    drafted = LLM(pair.target, str(tmp_path / "head"), {"adaptive": False}).generate(prompts, greedy)
    assert all(each.speculation.drafted for each in drafted)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def config_with(given: dict[str, Any], mode: str = "eagle3") -> EagleConfig | MedusaConfig:
    taps = TAPS if mode == "eagle3" else {}
    return convert(llama(num_hidden_layers=3), mode, {**taps, **given}).sametoken.head.config


def test_the_names_of_the_architecture_are_honoured_nested_or_not():
    nested = {
        "num_hidden_layers": 2, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 8, "max_position_embeddings": 48, "rms_norm_eps": 1e-3, "rope_theta": 500.0, "hidden_act": "gelu",
        "sliding_window": 6, "attention_bias": True, "mlp_bias": True, "norm_before_residual": True,
        "norm_before_fc": True, "fc_norm": True, "norm_output": True, "has_lm_head": False, "torch_dtype": "bfloat16",
        "hidden_size": 32, "vocab_size": 64, "draft_vocab_size": 64, "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": False, "attention_dropout": 0.0,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 1], "initializer_range": 0.5, "use_mtp_layernorm": False,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1, "rope_scaling": None, "model_type": "llama",
    }  # fmt: skip
    assert set(ARCHITECTURE) == {*nested, "bias"}
    model = convert(llama(num_hidden_layers=3), "eagle3", {NESTED: nested})
    config, layers = model.sametoken.head.config, model.sametoken.head.config.layers
    assert (layers.num_layers, layers.intermediate_size, layers.num_heads, layers.num_kv_heads) == (2, 40, 2, 1)
    assert (layers.head_dim, layers.max_position, layers.norm_eps, layers.rope.theta) == (8, 48, 1e-3, 500.0)
    assert (layers.activation, layers.sliding_windows, layers.dtype) == ("gelu", (6, 6), "bfloat16")
    assert all((layers.qkv_bias, layers.out_bias, layers.mlp_bias))
    assert all((config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output))
    assert (config.own_head, config.last_norm, config.taps) == (False, False, (0, 2, 1))
    assert model.sametoken.head.fc.weight.std().item() == pytest.approx(0.5, rel=0.1)
    flat = convert(llama(num_hidden_layers=3), "eagle3", nested).sametoken.head.config
    assert flat == config
    one = config_with({"bias": True, "use_last_layernorm": True, "eagle_num_layers": 2}, "eagle1")
    assert (one.fc_bias, one.last_norm, one.layers.num_layers, one.input_norm) == (True, True, 2, False)
    assert config_with({"use_input_layernorm_in_first_layer": True}, "eagle1").input_norm
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert config_with({"rope_scaling": yarn}).layers.rope.kind == "yarn"


def test_the_names_of_the_loss_are_honoured():
    model = convert(llama(num_hidden_layers=3), "eagle3", {
        **TAPS, "eagle_ttt_steps": 3, "eagle_loss_decay_factor": 0.5, "eagle_self_logit_distillation": False,
        "eagle_hidden_state_distillation": False, "eagle_report_acc": False,
    })  # fmt: skip
    settings = model.sametoken.settings
    assert (model.sametoken.steps, settings.loss_decay, settings.loss) == (3, 0.5, "hard")
    tokens = tokens_of()
    assert set(model.eval()(input_ids=tokens, labels=tokens)) == {"loss", "logits"}
    kept = convert(llama(), "eagle1", {}).sametoken.settings
    assert kept.feature_weight > 0
    dropped = convert(llama(), "eagle1", {"eagle_hidden_state_distillation": False}).sametoken.settings
    assert (dropped.feature_weight, dropped.guess_weight) == (0.0, 1.0)
    assert set(LOSS) | set(SWITCHES) == {
        "eagle_ttt_steps", "eagle_loss_decay_factor", "eagle_self_logit_distillation",
        "eagle_hidden_state_distillation", "eagle_report_acc",
    }  # fmt: skip


@pytest.mark.parametrize("name", [*ONLY, "eagle_base_lora_rank"])
def test_what_is_not_done_here_is_refused_and_its_absence_may_be_said(name):
    mode = "medusa" if name.startswith("medusa") else "eagle3"
    only, reason = ONLY.get(name, (None, "never change the target"))
    other = {bool: not only, dict: {"factor": 32.0}, str: "kimik2", int: 4, type(None): 64}[type(only)]
    with pytest.raises(ConfigError, match=f"^{name}.*{reason[:20]}"):
        config_with({name: other}, mode)
    if name in ONLY:
        config_with({name: only}, mode)


@pytest.mark.parametrize(
    ("mode", "given", "message"),
    [
        ("eagel3", {}, "did you mean 'eagle3'"),
        ("eagle3", {"eagle_ttt_step": 3}, "did you mean 'eagle_ttt_steps'"),
        ("eagle3", {NESTED: {"num_hidden_layer": 1}}, "did you mean 'num_hidden_layers'"),
        ("eagle3", {NESTED: 3}, "expected a mapping"),
        ("medusa", {"eagle_ttt_steps": 3}, "unknown key 'eagle_ttt_steps'"),
        ("eagle3", {"medusa_num_heads": 3}, "unknown key 'medusa_num_heads'"),
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads = 0: .*greater than or equal to 1"),
        ("eagle3", {"eagle_num_layers": 2, NESTED: {"num_hidden_layers": 1}}, "name it once"),
        ("eagle3", {"rope_theta": 1.0, NESTED: {"rope_theta": 2.0}}, "leave one of them out"),
        ("eagle3", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected float or int"),
        ("eagle3", {"num_attention_heads": True}, "num_attention_heads is True, expected int"),
        ("eagle3", {"intermediate_size": -1}, "expected more than 0"),
        ("eagle3", {"num_attention_heads": 4, "num_key_value_heads": 3}, "a multiple of num_key_value_heads 3"),
        ("eagle3", {"num_key_value_heads": 3}, "4 attention heads, expected a multiple of 3"),
        ("eagle3", {"hidden_act": "silo"}, "did you mean 'silu'"),
        ("eagle3", {"hidden_size": 64}, "hidden_size is 64, expected the model's 32"),
        ("eagle3", {"draft_vocab_size": 32}, "name the vocabulary by draft_vocab_cache"),
        ("eagle3", {"use_aux_hidden_state": False}, "use_aux_hidden_state is False"),
        ("eagle1", {"eagle_aux_hidden_state_layer_ids": [1]}, "is for mode eagle3"),
        ("eagle1", {"fc_norm": True}, "fc_norm of the head is True"),
        ("eagle3", {"use_input_layernorm_in_first_layer": False}, "always norms"),
        ("eagle3", {"eagle_hidden_state_distillation": True}, "no hidden state of the target"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "expected different blocks from 0 to 2"),
        ("eagle3", {"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not supported"),
    ],
    ids=str,
)
def test_configurations_that_mean_nothing_are_refused(mode, given, message):
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        config_with(given, mode)


def test_a_reduced_vocabulary_is_modelopts_file(tmp_path):
    ids = torch.tensor([40, 3, 9, 17])
    torch.save(ids - torch.arange(4), tmp_path / "d2t.pt")
    model = convert(llama(), "eagle3", {"draft_vocab_size": 4, "draft_vocab_cache": str(tmp_path)})
    assert model.sametoken.head.draft_ids.tolist() == [3, 9, 17, 40]
    tokens = tokens_of()
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "d2t.pt").unlink()
    again = sametoken_train.restore(llama(), tmp_path / "saved")
    assert all(torch.equal(value, head_of(again)[name]) for name, value in head_of(model).items())
    torch.save(ids - torch.arange(4), tmp_path / "d2t.pt")
    with pytest.raises(ConfigError, match="draft_vocab_size is 5, expected 4"):
        convert(llama(), "eagle3", {"draft_vocab_size": 5, "draft_vocab_cache": str(tmp_path / "d2t.pt")})
    for content in (torch.tensor([0, 90]), {"d2t": 1}):
        torch.save(content, tmp_path / "d2t.pt")
        with pytest.raises(ConfigError, match=r"draft_vocab_cache .*: "):
            convert(llama(), "eagle3", {"draft_vocab_cache": str(tmp_path)})


def test_what_cannot_be_trained_on_is_refused():
    model = convert(llama(), "eagle3", {})
    tokens = tokens_of()
    with pytest.raises(DataError, match=r"labels differ from input_ids at \d+ tokens.*moved here"):
        model(input_ids=tokens, labels=tokens.roll(-1, 1))
    with pytest.raises(DataError, match="expected one shape"):
        model(input_ids=tokens, labels=tokens[:, 1:])
    holes = torch.ones_like(tokens)
    holes[0, 4] = 0
    with pytest.raises(DataError, match="padding between tokens"):
        model(input_ids=tokens, attention_mask=holes, labels=tokens)
    with pytest.raises(ConfigError, match="got position_ids beside labels"):
        model(input_ids=tokens, labels=tokens, position_ids=torch.arange(20))
    with pytest.raises(ConfigError, match="labels without input_ids"):
        model(labels=tokens)
    with pytest.raises(ConfigError, match="converted already"):
        convert(model, "medusa", {})
    for modes in ("eagle3", [("medusa", {}), ("eagle3", {})], [("medusa", None)], [("medusa",)], {"medusa": {}}, None):
        with pytest.raises(ConfigError, match="expected one pair of a name and a mapping"):
            sametoken_train.convert(llama(), modes)  # type: ignore[arg-type]


def test_models_that_compute_otherwise_are_refused():
    class Scaled(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * 4

    scaled = llama()
    scaled.set_input_embeddings(Scaled(64, 32))
    with pytest.raises(UnsupportedModelError, match="scales or caps its token vectors"):
        convert(scaled, "eagle3", {})
    biased = llama()
    biased.lm_head = nn.Linear(32, 64, bias=True)
    with pytest.raises(UnsupportedModelError, match="an output layer without a bias"):
        convert(biased, "eagle3", {})
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(UnsupportedModelError, match="'GPT2LMHeadModel' is a decoder of another family"):
        convert(gpt, "medusa", {})


def test_heads_of_another_kind_and_damaged_ones_are_refused(tmp_path):
    model = convert(llama(), "eagle3", {})
    model.save_pretrained(tmp_path)
    other = convert(llama(), "eagle3", {"fc_norm": True})
    with pytest.raises(CheckpointError, match=r"first that differs: sametoken\.head\.fc_norms"):
        other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    with pytest.raises(ConfigError, match="push_to_hub is for the model's own weights"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(CheckpointError, match="holds no head in training"):
        sametoken_train.restore(llama(), tmp_path / "head")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="damaged"):
        sametoken_train.restore(llama(), tmp_path)
