"""Files of strangers that commands read as conversations or settings: one error, in time, never a traceback."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ASKED = b'{"messages": [{"role": "user", "content": '
FILES = {
    "a line of 20 MB": ASKED + json.dumps("a " * 10_000_000).encode() + b"}]}\n",
    "broken text": ASKED + b'"\xff\xfe"}]}\n',
    "nested lists": b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}\n",
    "nested objects": ASKED + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}]}\n",
    "a number of 5,000 digits": b'{"messages": 1' + b"0" * 5000 + b"}\n",
    "cut off": ASKED + b'"us\n',
    "zeros": bytes(1000),
}
COMMANDS = {
    "generate": ["--max-tokens", "1", "--data"],
    "prepare": ["--output", "OUT", "--data"],
    "synthesize": ["--max-tokens", "1", "--output", "OUT.jsonl", "--data"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_conversations(run: Any, tmp_path: Path, command: str, name: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(FILES[name])
    options = [option.replace("OUT", str(tmp_path / "out")) for option in COMMANDS[command]]
    begin = time.monotonic()
    answer = run(command, "embedded", *options, str(data))
    assert answer.code in (1, 2)
    assert "Traceback" not in answer.err
    assert str(data) in answer.err or name == "a line of 20 MB"
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("option", ["--config", "--extra-llm-api-options"])
def test_settings_that_nest_or_multiply(run: Any, tmp_path: Path, option: str) -> None:
    letters = "abcdefghijkl"
    aliases = [f"{after}: &{after} [{', '.join([f'*{name}'] * 9)}]" for name, after in pairwise(letters)]
    texts = {"is not YAML": "a: " + "[" * 10_000, "unknown key 'a'": "\n".join(["a: &a [x]", *aliases])}
    for words, text in texts.items():
        place = tmp_path / "settings.yml"
        place.write_text(text)
        answer = run("serve", "embedded", "--port", "0", option, str(place))
        assert answer.code == 2
        assert words in answer.err
