"""A tiny target with conversations of letters, and what it takes to train heads for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sametoken.train.session import train
from sametoken.train.settings import (
    ALIASES,
    DataSettings,
    HeadSettings,
    KeepSettings,
    LossSettings,
    RunSettings,
    TrainingSettings,
)
from sametoken.train.trainer import Outcome

TAPS = "0,1,2"
ANSWERS = ("one two three", "three two one", "abc abc abc", "hello hello")


# The keys that Model Optimizer 0.47 has in its own recipe for EAGLE-3, with values for a tiny run.
MODELOPT_RECIPE = """
metadata: {recipe_type: speculative_eagle, description: a test}
model: {model_name_or_path: , trust_remote_code: false, use_fake_base_for_offline: false}
data: {mode: , data_path: absent.jsonl, offline_data_path: , draft_vocab_cache: , vlm_img_dir: , vlm_processor: }
training:
  output_dir:
  num_train_epochs: 1
  per_device_train_batch_size: 2
  learning_rate: 1e-3
  warmup_steps: 1
  training_seq_len: 128
  logging_steps: 7
  save_steps: 50
  cp_size: 1
  disable_tqdm: false
  estimate_ar: false
  ar_validate_steps: -1
  answer_only_loss: false
  do_eval: false
  lr_scheduler_type: linear
  save_strategy: steps
  weight_decay: 0.0
  dataloader_drop_last: true
  bf16: true
  tf32: true
  remove_unused_columns: false
eagle:
  eagle_decoder_type: llama
  eagle_ttt_steps: 2
  eagle_mix_hidden_states: false
  eagle_use_torch_compile: true
  eagle_self_logit_distillation: true
  eagle_freeze_base_model: true
  eagle_loss_decay_factor: 0.9
  eagle_hidden_state_distillation: false
  eagle_reuse_base_decoder: false
  eagle_report_acc: true
  eagle_enable_nvtx: false
  eagle_export_rope_scaling: {rope_type: yarn, factor: 32.0, original_max_position_embeddings: 2048}
  eagle_architecture_config: {}
"""


def write_conversations(file: Path, count: int = 24) -> Path:
    """Conversations of one turn, some longer than others."""
    with file.open("w") as stream:
        for i in range(count):
            turns = [
                {"role": "user", "content": f"say {i % 5}"},
                {"role": "assistant", "content": " ".join([ANSWERS[i % 4]] * (1 + i % 3))},
            ]
            stream.write(json.dumps({"conversation_id": i, "category": "ab"[i % 2], "conversations": turns}) + "\n")
    return file


def make_plan(output: Path, **chosen: Any) -> TrainingSettings:
    """Settings of a short run; keys go to the group that knows them."""
    mode = ALIASES.get(chosen.get("mode", "eagle"), chosen.get("mode"))
    plain = {} if "init_from" in chosen else {"fc_norm": False, "norm_output": False}
    usual = {"eagle3": {"taps": TAPS, "ttt_steps": 3, **plain}, "eagle1": {"ttt_steps": 3}}
    values = {**usual.get(mode, {}), "lr": 3e-3, "training_seq_len": 128, "train_bs": 1, "max_steps": 6,
              "save_steps": 3, "logging_steps": 2, "output_dir": str(output), **chosen}  # fmt: skip
    groups = (HeadSettings, LossSettings, RunSettings, KeepSettings)
    plan = TrainingSettings(
        *(group(**{k: v for k, v in values.items() if k in group.model_fields}) for group in groups)
    )
    unknown = [key for key in values if not any(key in group.model_fields for group in groups)]
    assert not unknown
    return plan


def train_tiny(target: str, data: Path, output: Path, tell=lambda line: None, evaluator=None, **chosen: Any) -> Outcome:
    """Trains for the tiny target."""
    vocabulary = {"draft_vocab_size": chosen.pop("draft_vocab_size")} if "draft_vocab_size" in chosen else {}
    plan = make_plan(output, **chosen)
    return train(target, plan, DataSettings(data=str(data), **vocabulary), evaluator=evaluator, tell=tell)


def log_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
