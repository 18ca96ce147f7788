"""Values in templates: quoted for the file, and a line without a value falls away."""

from __future__ import annotations

import jinja2
import pytest
import yaml

from sametoken.deploy import templates


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("a", "run a\n"), ("it's $x", """run 'it'"'"'s $x'\n"""), (("a", "b c"), "run a 'b c'\n"), (7, "run 7\n"),
        (None, ""), ((), ""),
    ],
)  # fmt: skip
def test_words_of_a_shell(value: object, line: str) -> None:
    environment = templates._environment(False)
    rendered = environment.from_string("run {{ value }}\nend\n").render(value=value)
    assert templates.complete_lines(rendered) == f"{line}end\n"


@pytest.mark.parametrize("value", ["a: b", "7", "true", "# x", "two\nlines", "", 7, 0.5, True, "a" * 300 + " b" * 300])
def test_scalars_of_yaml(value: object) -> None:
    rendered = templates._environment(True).from_string("- key: {{ value }}\n  other: 1\n").render(value=value)
    assert yaml.safe_load(rendered) == [{"key": value, "other": 1}]


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'valeu' is undefined"):
        templates._environment(False).from_string("run {{ valeu }}\n").render(value=1)


def test_names_of_another_program() -> None:
    assert templates.named("fp8", {"fp8": "fp8_e4m3"}) == "fp8_e4m3"
    assert templates.named("auto", {"fp8": "fp8_e4m3"}) == "auto"
    assert templates.named("none", {"auto": "model"}, "openai") == "openai"
    assert templates.named(None, {}, "openai") is None
    assert templates.in_json({"a": 1, "b": None}) == '{"a": 1}'
