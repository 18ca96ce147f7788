"""Options of `sametoken train` from a recipe, and the plan of a run that `--dry-run` prints."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin

from sametoken import embedded
from sametoken.commands.options import Chosen, Option, Values
from sametoken.errors import ConfigError

if TYPE_CHECKING:
    from sametoken.train.session import RunPlan

OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
AGREED = "chosen for this run"


class Recipe(Chosen):
    """Values of all options, some of them from a recipe.

    Attributes:
        origins: place in the recipe of each value that is from one, by option.
    """

    def __init__(self, values: Values, given: Sequence[str], origins: dict[str, str]) -> None:
        super().__init__(values, given)
        self.origins = origins


def settled(words: list[str] | None, values: Chosen, options: Sequence[Option]) -> tuple[str | None, Chosen]:
    """Model, and options with those of the recipe; options of the command line win.

    Args:
        words: positional arguments: the model, and `key=value`.

    Raises:
        ConfigError: there are several models, or the recipe is wrong.
    """
    overrides = [word for word in words or () if OVERRIDE.match(word)]
    models = [word for word in words or () if word not in overrides]
    if len(models) > 1:
        raise ConfigError(f"got {' and '.join(models)}; expected one model, and settings as key=value")
    model = models[0] if models else None
    if values["config"] is None and not overrides:
        return model, values
    from sametoken.train.recipe import read_recipe

    named = {option.name: option for option in options if option.name not in ("config", "dry_run", "json")}
    found = read_recipe(values["config"], overrides, named)
    beaten = {*values.given, *(["model"] if models else [])}
    left = {name: each for name, each in found.items() if name not in beaten}
    chosen = {name: _typed(named[name], each.value, each.origin) for name, each in left.items()}
    origins = {name: each.origin for name, each in left.items()}
    return model, Recipe({**values, **chosen}, [*values.given, *left], origins)


def _typed(option: Option, value: Any, origin: str) -> Any:
    """Value of a recipe in the type of its option."""
    kind = option.kind
    words = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "text")
    wrong = ConfigError(f"{origin} is {value!r}, expected {words}")
    if get_origin(kind) is list:
        return [get_args(kind)[0](each) for each in (value if isinstance(value, list) else [value])]
    if kind is str:
        texts = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return json.dumps(value) if isinstance(value, dict) else texts
    if isinstance(value, bool) != (kind is bool):
        raise wrong
    try:
        found = value if kind is bool else kind(float(value))
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if found != float(value):
        raise wrong
    return found


def show_plan(model: str, plan: RunPlan, values: Chosen) -> None:
    """Print the settings of a run, each with its origin, and its amount of data and steps."""
    origins = values.origins if isinstance(values, Recipe) else {}
    named = "default" if model == embedded.NAME else "command line"
    settings: dict[str, tuple[Any, str]] = {"model": (model, origins.get("model", named))}
    for group in plan.groups:
        for name in type(group).model_fields:
            value = getattr(group, name)
            if name in origins:
                origin = origins[name]
            elif name in values.given:
                origin = "command line"
            else:
                origin = "default" if value == values[name] or name == "do_eval" else AGREED
            settings[name] = (value, origin)
    if values["json"]:
        every = {name: {"value": value, "origin": origin} for name, (value, origin) in settings.items()}
        amounts = {"samples": plan.samples, "tokens": plan.tokens, "steps": plan.steps}
        print(json.dumps({"settings": every, **amounts, "notes": plan.notes}))
        return
    wide = max(map(len, settings)) + 1
    for name, (value, origin) in settings.items():
        print(f"{name:{wide}} {'-' if value is None else value!s:24} {origin}")
    print(f"{plan.samples} samples, {plan.tokens} tokens, {plan.steps} steps; nothing was trained (--dry-run)")
