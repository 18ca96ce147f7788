"""Chat templates by llama.cpp's names: the texts are those of llama.cpp's tests/test-chat-template.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sametoken.checkpoint.chat import read_template
from sametoken.checkpoint.template_names import FORMS, TEMPLATES
from sametoken.errors import CheckpointError

SAID = [
    ("system", "You are a helpful assistant"),
    ("user", "Hello"),
    ("assistant", "Hi there"),
    ("user", "Who are you"),
    ("assistant", "   I am an assistant   "),
    ("user", "Another question"),
]
EXPECTED = json.loads((Path(__file__).parent / "named_templates.json").read_text(encoding="utf-8"))


def rendered(name: str, turns: list[tuple[str, str]], bos: str = "", reply: bool = True) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": role, "content": content} for role, content in turns]
    template = environment.from_string(TEMPLATES[name])
    return template.render(messages=messages, add_generation_prompt=reply, bos_token=bos)


@pytest.mark.parametrize("name", EXPECTED)
def test_texts_are_llama_cpps(name: str) -> None:
    assert rendered(name, SAID) == EXPECTED[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_is_one(name: str) -> None:
    assert read_template(name) == TEMPLATES[name]
    text = rendered(name, SAID[1:], bos="<BOS>")
    assert text.count("<BOS>") == FORMS[name].bos
    assert "Hello" in text
    assert text.index("Hello") < text.index("Another question")
    assert rendered(name, SAID, reply=False) == rendered(name, SAID).removesuffix(FORMS[name].reply)


def test_a_result_of_a_tool_and_a_missing_system_text() -> None:
    assert rendered("kimi-k2", [("tool", "7")], reply=False) == "<|im_system|>tool<|im_middle|>7<|im_end|>"
    assert rendered("bailing2", [("user", "a")]).startswith("<role>SYSTEM</role>detailed thinking off<|role_end|>")
    assert rendered("gemma", [("user", "a")], reply=False) == "<start_of_turn>user\na<end_of_turn>\n"


def test_an_unknown_name_is_a_missing_file() -> None:
    with pytest.raises(CheckpointError, match="chat template chatmll: No such file"):
        read_template("chatmll")
