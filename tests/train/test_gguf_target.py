"""Heads for targets in GGUF files: hidden states are those of the quantised weights, as they are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from gguf_makers import embedded_gguf
from sametoken.engine.load import load_models
from sametoken.options.engine import EngineConfig
from sametoken.train.dataset.extraction import FeatureReader
from sametoken.train.dataset.prepared import Prepared
from training_checks import write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_gguf_target_is_read_as_it_is_served(tmp_path: Path, run: Any) -> None:
    target = str(embedded_gguf(tmp_path, "embedded", Type.Q4_0)[0])
    data = str(write_conversations(tmp_path / "data.jsonl"))
    out = str(tmp_path / "prepared")
    answer = run("prepare", target, "--data", data, "--output", out, "--hidden-states", "--threads", "1")
    assert answer.code == 0, answer.err
    prepared = Prepared.open(out)
    found = prepared.features(0)
    assert found is not None
    taps = prepared.manifest.taps
    assert taps == (1, 7, 12)
    tokens = prepared[0].tokens

    def states(model: str) -> torch.Tensor:
        decoder = load_models(model, None, (None, None), EngineConfig()).target
        return FeatureReader(decoder, taps, len(tokens))(tokens)[:, -1].float()

    assert torch.equal(found.last.float(), states(target))
    plain = states("embedded")
    assert float((found.last.float() - plain).norm() / plain.norm()) > 0.02  # of the weights before rounding
    for source in (out, data):  # stored, and computed in training
        place = str(tmp_path / f"head-{Path(source).stem}")
        trained = run("train", target, "--data", source, "--output-dir", place, "--max-steps", "1", "--threads", "1")
        assert trained.code == 0, trained.err
    logs = [json.loads((tmp_path / name / "log.jsonl").read_text()) for name in ("head-prepared", "head-data")]
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=0.02)
