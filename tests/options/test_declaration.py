"""What the edges read from declarations: texts, limits in words, other tools' names, and numbers that are refused."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from sametoken.commands.options import Option, refuse_beyond, settings_options
from sametoken.errors import ConfigError
from sametoken.options import engine, sampling, server, speculation, training
from sametoken.options.declaration import Count, Elsewhere, Settings, Shown, declared, expected, limits, members
from sametoken.options.sampling import RequestSpeculation, SamplingParams, StructuredOutputs
from sametoken.options.serving import OPTIONS, elsewhere
from sametoken.server.fields import view


class Oven(Settings):
    """An oven."""

    heat: Annotated[float, Field(gt=0, le=300), Elsewhere("stove plate.heat/warmth", "stove fire")] = 20.0
    """degrees
    of the air."""
    trays: Annotated[Count | None, Shown(("--sheets",))] = None
    """trays in it; None is all."""
    key: Annotated[str, Shown(http=None, words="a key")] = "none"
    """who may open it."""


CLASSES = [
    each
    for module in (engine, server, speculation, training)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Settings) and each is not Settings
]


@pytest.mark.parametrize("owner", [*CLASSES, SamplingParams, RequestSpeculation, StructuredOutputs])
def test_every_option_has_a_text(owner: type) -> None:
    assert [name for name, option in declared(owner).items() if not option.help] == []


def test_a_declaration_says_name_type_default_text_and_names_elsewhere() -> None:
    heat, trays, key = declared(Oven).values()
    assert (heat.name, heat.field.default, heat.help) == ("heat", 20.0, "degrees of the air.")
    assert (members(heat.hint), limits(heat.hint)) == ([float], {"gt": 0, "le": 300})
    assert members(trays.hint) == [int, type(None)]
    assert limits(trays.hint) == {"ge": 0}
    assert heat.elsewhere == ("stove plate.heat/warmth", "stove fire")
    assert (key.shown.http, key.elsewhere) == (None, ())


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (declared(Oven)["heat"], "a number in (0, 300]"),
        (declared(Oven)["trays"], "an integer >= 0 or None"),
        (declared(Oven)["key"], "a key"),
        (declared(SamplingParams)["temperature"], "a finite number >= 0"),
        (declared(SamplingParams)["ignore_eos"], "true or false"),
        (declared(SamplingParams)["seed"], "an integer or None"),
        (declared(SamplingParams)["speculative"], "a RequestSpeculation or None"),
        (declared(RequestSpeculation)["prediction"], "text or None"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_limits_are_said_in_words(option: Any, words: str) -> None:
    assert expected(option) == words


def test_the_command_line_is_a_view() -> None:
    heat, trays, key = settings_options(Oven, "oven_")
    assert (heat.name, heat.kind, heat.default, heat.help) == ("oven_heat", float, 20.0, "degrees of the air.")
    assert trays.spellings == ("--oven-trays", "--oven_trays", "--sheets")
    assert key.default == "none"


def test_a_body_is_a_view() -> None:
    body = view("OvenBody", Oven)
    assert list(body.model_fields) == ["heat", "trays"]
    assert body().heat is None
    assert body(heat=7, trays=3.0).trays == 3
    with pytest.raises(ValidationError, match="less than or equal to 300"):
        body(heat=301)
    said = view("OneOven", Oven, "heat", defaults=True).model_json_schema()["properties"]
    assert said["heat"] == {
        "anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 300}, {"type": "null"}], "default": 20.0,
        "description": "degrees of the air.", "title": "Heat",
    }  # fmt: skip


def test_names_elsewhere_are_found_by_tool_and_group() -> None:
    assert elsewhere("vllm", "ngram")["prompt_lookup_max"] == "max_matching_ngram_size"
    assert elsewhere("trtllm", "kv_cache_config")["tokens_per_block"] == "kv_cache_tokens_per_block"
    assert "tokens_per_block" not in elsewhere("trtllm")
    said = [name for option in OPTIONS.values() for name in option.elsewhere]
    assert len(said) == len(set(said)), "two options have one name elsewhere"


@pytest.mark.parametrize(
    ("type_", "value", "words"),
    [
        (Count, -1, "--cakes -1: expected at least 0"),
        (Count, 10**400, f"--cakes {10**400}: expected at most {2**63 - 1}"),
        (Annotated[int, Field(ge=1, le=9)], 10, "--cakes 10: expected at most 9"),
        (Annotated[float, Field(gt=0)], 0.0, "--cakes 0.0: expected more than 0"),
        (Annotated[float, Field(gt=0)], float("nan"), "--cakes nan: expected a finite number"),
        (Annotated[float, Field(gt=0)], float("inf"), "--cakes inf: expected a finite number"),
    ],
)
def test_numbers_beyond_the_limits_of_an_option_are_refused(type_: Any, value: float, words: str) -> None:
    option = Option("cakes", type_, None, "how many.")
    with pytest.raises(ConfigError) as refused:
        refuse_beyond([option], {"cakes": value})
    assert str(refused.value) == words
    refuse_beyond([option], {"cakes": None})
    refuse_beyond([option, Option("free", int, 0, "any.")], {"cakes": 1, "free": -5})


def test_parameters_that_do_not_exist_are_named_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown argument 'temprature': did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    assert sampling.RECOMMENDED == ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
