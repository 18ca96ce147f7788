"""`sametoken train`: the launch scripts' own lines, what is refused, and that every setting is read by something."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import sametoken
from sametoken.heads.eagle3.objective import FLAGS
from sametoken.heads.objective import HeadObjective
from sametoken.learning.modes import TRAINED
from sametoken.model.config import ModelConfig
from sametoken.train.settings import GROUPS, HeadSettings
from training_checks import TAPS, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCES = Path(sametoken.__file__).parent

# As the README of the workflow has them, after the program's name.
MEDUSA = """--model {model} --data {data} --mode medusa --num_epochs 1 --lr 1e-5 --save_steps 1000 --output_dir {out}
--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --num_gpu 1 --medusa_num_heads 2 --medusa_num_layers 1"""
EAGLE = """--model {model} --data {data} --mode eagle --num_epochs 1 --lr 1e-5 --save_steps 1000 --output_dir {out}
--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --num_gpu 1 --eagle_num_layers 1"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl")


def test_the_launch_scripts_lines_work(pair, data, tmp_path, run):
    medusa = run("train", *MEDUSA.format(model=pair.target, data=data, out=tmp_path / "medusa").split(), "--threads=1")
    assert medusa.code == 0, medusa.err
    assert json.loads((tmp_path / "medusa" / "head" / "config.json").read_text())["medusa_num_heads"] == 2
    # The tiny target has too few blocks for the usual taps.
    eagle = [*EAGLE.format(model=pair.target, data=data, out=tmp_path / "eagle").split(), "--taps", TAPS]
    refused = run("train", *eagle[:-2])
    assert refused.code == 2
    assert "name them" in refused.err
    more = ["--threads=1", "--train_bs=2", "--training_seq_len=128", "--do_eval", "True", "--ttt_steps=2"]
    done = run("train", *eagle, *more)
    assert done.code == 0, done.err
    assert "mode eagle means eagle3" in done.err
    config = json.loads((tmp_path / "eagle" / "head" / "config.json").read_text())
    assert config["sametoken"]["version"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "eagel3"], "eagle3"),
        (["--mode", "redrafter"], "--mode = 'redrafter'"),
        ([], "got no --data"),
        (["--data", "absent.jsonl"], "absent.jsonl"),
        (["--do_eval", "perhaps"], "expected True or False"),
        (["--loss_mix", "half"], "expected adaptive, alpha or a number"),
        (["--model", "other"], "leave one of them out"),
        (["--eagle_config", "absent.json", "--data", "{data}"], "absent.json"),
        (["--taps", "1,9,3", "--data", "{data}"], "expected different blocks from 0 to 2"),
        (["--mode", "eagle3", "--fc_bias", "--data", "{data}"], "fc_bias is for mode eagle1; leave it out for eagle3"),
        (["--mode", "eagle1", "--taps", TAPS, "--data", "{data}"], "taps is for mode eagle3"),
        (["--mode", "medusa", "--ttt-steps", "3", "--data", "{data}"], "--ttt-steps is for --mode eagle3 or eagle1"),
        (["--mode", "eagle3", "--noise", "0.1", "--data", "{data}"], "--noise is for --mode eagle1"),
        (["--init_from", "head", "--fc_norm", "--data", "{data}"], "init_from keeps its architecture"),
        (["--mode", "medusa", "--draft_vocab_size", "8", "--data", "{data}"], "leave --draft-vocab-size out"),
        (["--training_seq_len", "200", "--taps", TAPS, "--data", "{empty}"], "no samples"),
    ],
    ids=str,
)
def test_refuses_in_one_line_and_leaves_nothing(pair, data, tmp_path, run, arguments, message):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    given = [each.format(data=data, empty=empty) for each in arguments]
    answer = run("train", pair.target, *given, "--output_dir", str(tmp_path / "out"))
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "head").exists()


def test_a_file_of_architecture_is_merged_and_checked(tmp_path):
    target = ModelConfig.from_hf(
        {"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
         "num_hidden_layers": 8, "num_attention_heads": 4, "max_position_embeddings": 64, "rope_theta": 5e5,
         "dtype": "float32"}
    )  # fmt: skip
    file = tmp_path / "eagle.json"

    def made(mode: str = "eagle3", **keys):
        file.write_text(json.dumps(keys))
        settings = HeadSettings(mode=mode, eagle_config=str(file))
        objective: type[HeadObjective] = settings.kind.load(settings.training.objective)
        return objective.configure(settings, target, 32)

    plain = made()
    assert plain.layers.rope.theta == 10000.0  # the draft's own
    assert plain.taps == (1, 3, 4)
    given = made(
        num_hidden_layers=2, intermediate_size=40, num_key_value_heads=2, rope_theta=2e4, sliding_window=8,
        eagle_aux_hidden_state_layer_ids=[0, 2, 5], use_aux_hidden_state=True, use_last_layernorm=True, fc_norm=True,
        hidden_size=16, use_input_layernorm_in_first_layer=True, torch_dtype="float32",
    )  # fmt: skip
    assert (given.layers.num_layers, given.layers.intermediate_size, given.layers.num_kv_heads) == (2, 40, 2)
    assert (given.layers.rope.theta, given.layers.sliding_windows, given.taps) == (2e4, (8, 8), (0, 2, 5))
    assert given.fc_norm
    first = made("eagle1", use_input_layernorm_in_first_layer=True, bias=True)
    assert (first.input_norm, first.fc_bias, first.own_head, first.taps) == (True, True, False, ())
    with pytest.raises(sametoken.errors.ConfigError, match=r"unknown key 'num_hiden_layers': did you mean 'num_hidden"):
        made(num_hiden_layers=2)
    biased = made(attention_bias=True).layers  # of a Llama: all four projections
    assert (biased.qkv_bias, biased.out_bias, biased.mlp_bias) == (True, True, False)
    with pytest.raises(sametoken.errors.ConfigError, match="in_first_layer is False, expected True"):
        made(use_input_layernorm_in_first_layer=False)
    with pytest.raises(sametoken.errors.ConfigError, match="hidden_size is 20, expected 16"):
        made(hidden_size=20)
    with pytest.raises(sametoken.errors.ConfigError, match="torch_dtype is 'bfloat16', expected 'float32'"):
        made(torch_dtype="bfloat16")


def read_names() -> set[str]:
    """Attributes that the sources read somewhere outside the settings themselves."""
    kinds = [*(SOURCES / "heads").glob("*/objective.py"), SOURCES / "heads" / "eagle" / "architecture.py"]
    files = [*(SOURCES / "train").glob("*.py"), *(SOURCES / "learning").glob("*.py"), SOURCES / "commands" / "train.py"]
    files.append(SOURCES / "options" / "training.py")  # what properties read
    trees = [ast.parse(file.read_text()) for file in [*files, *kinds]]
    found = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # EAGLE-3 reads the flags that a tuple names, with getattr, and a run an option that `Training` names.
    named = [FLAGS, (each.training.rewriting for each in TRAINED.values())]
    return found | {name for names in named for name in names}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_setting_is_read_by_something(group):
    assert set(group.model_fields) <= read_names()
