"""Python code of a checkpoint never runs, and nobody is asked whether it may."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CODE = """
import pathlib
pathlib.Path({trace!r}).write_text("ran")
from transformers import PreTrainedTokenizer
class Own(PreTrainedTokenizer):
    pass
"""


def test_a_tokenizers_code_is_refused_without_a_question(tmp_path: Path) -> None:
    model, trace = tmp_path / "model", tmp_path / "trace"
    model.mkdir()
    (model / "own.py").write_text(CODE.format(trace=str(trace)))
    (model / "vocab.json").write_text("{}")
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    mapped = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(mapped))
    program = (
        "from pathlib import Path; from sametoken.checkpoint.tokenizer_files import load_tokenizer; "
        f"load_tokenizer(Path({str(model)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="y\ny\ny\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert not trace.exists()
    assert "y/N" not in done.stdout + done.stderr
    assert done.returncode == 1
    assert f"CheckpointError: {model / 'tokenizer_config.json'}: auto_map names Python code" in done.stderr
