"""Conversion of the options of `sametoken serve` to the command of another engine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from sametoken.commands.models import model_names
from sametoken.commands.options import Chosen, Option, Values, settings_of, titled
from sametoken.commands.resolution import ROUNDING, resolve
from sametoken.dialects.flags import FLAGS
from sametoken.dialects.rules import NoEffect
from sametoken.dialects.vllm_door import STATED
from sametoken.errors import ConfigError, unknown_name
from sametoken.kinds import named
from sametoken.options.declaration import declared
from sametoken.options.serving import OPTIONS as SERVING
from sametoken.options.speculation import AUTO, NO_DRAFT, SpeculativeConfig

if TYPE_CHECKING:
    from sametoken.deploy.plan.launch import Launch

OURS = "sametoken"
ENGINES = (OURS, "vllm", "sglang", "trtllm")
SERVERS = {"vllm": "vllm serve", "trtllm": "trtllm-serve"}  # servers to which their own options are passed on
OPTIONS = titled(
    "Another engine",
    Option(
        "engine",
        str,
        OURS,
        "engine that serves the model: sametoken, or another one that is installed.",
        "|".join(ENGINES),
    ),
    Option("engine_args", str, None, "further words for the command of that engine, for example '--seed 1'.", "TEXT"),
    Option("out", str, None, "directory for the head in that engine's layout, if it needs another one.", "DIR"),
)


def check_engine(values: Values) -> None:
    """Refuse an unknown engine, and options for other engines without --engine.

    Raises:
        ConfigError: an option is refused; the message names it.
    """
    if values["engine"] not in ENGINES:
        raise ConfigError(unknown_name("engine", values["engine"], ENGINES))
    if values["engine"] == OURS and values["out"] is not None:
        raise ConfigError("--out is for a head that another engine reads; give --engine, or leave --out out")


def planned(model: str | None, values: Chosen) -> tuple[Launch, list[str]]:
    """Launch of the engine of `--engine`, and a sentence for each setting that was left out.

    Raises:
        SametokenError: the engine has no equivalent of an option, or a file cannot be read.
    """
    from sametoken.deploy.plan.engines import ENGINES as TRANSLATIONS
    from sametoken.deploy.plan.launch import Wanted
    from sametoken.deploy.plan.models import check_target, place_draft, target_place

    check_engine(values)
    engine = values["engine"]
    passed = _passed(engine, values)
    unsaid = {name: None for name in passed if name == ROUNDING}
    resolution = resolve(model, Chosen({**values, **unsaid}, values.given - passed.keys()))
    found, notes = resolution.values, list(resolution.notes)
    speculative = SpeculativeConfig(**settings_of(SpeculativeConfig, found))
    target, draft = model_names(model, found["draft"], speculative.method)
    method = None if speculative.method == NO_DRAFT else speculative.method
    stated = {
        name: getattr(speculative, name) if name in declared(SpeculativeConfig) else found[name]
        for name in resolution.origins
        if name in SERVING and name not in ("draft", "method", "api_key")
    }
    keys = "api_key" in resolution.origins
    notes += check_target(target, engine, found["tensor_parallel_size"])
    layers: tuple[int, ...] = ()
    if engine != OURS:
        if method == AUTO:
            raise ConfigError(f"--method auto: only sametoken mixes drafters; choose one for {engine}")
        if draft is not None:
            draft, method, placed, layers = place_draft(draft, method, engine, target, values["out"])
            notes += placed
        elif values["out"] is not None:
            raise ConfigError("--out is for a head; give --draft, or leave --out out")
        if method is not None and named(method).weights is not None and draft is None and not named(method).inside:
            raise ConfigError(f"--method {method} needs a draft; give its directory or Hub id as --draft")
        if method is None and (lost := sorted(stated.keys() & declared(SpeculativeConfig).keys())):
            raise ConfigError(
                f"--{lost[0].replace('_', '-')} is for drafts, and there are none; give --draft or --method"
            )
        stated.setdefault("served_model_name", (target,))
        target = target_place(target)
    else:
        passed |= {name: values[name] for name in ("threads", "cpus") if values[name] is not None}
    extra = [word for name, value in passed.items() for word in _spoken(name, value)]
    extra += shell_words(values, "engine_args")
    image = values.get("image") or ""
    wanted = Wanted(target, draft, method, speculative, stated, keys, tuple(extra), image, layers)
    launch = TRANSLATIONS[engine](wanted)
    return launch, [*notes, *launch.notes]


def shell_words(values: Values, name: str) -> tuple[str, ...]:
    """Words of the text of an option, divided as a shell does; none if it was not given.

    Raises:
        ConfigError: no shell reads the text.
    """
    try:
        return tuple(shlex.split(values[name] or ""))
    except ValueError as error:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} {values[name]!r}: {error}; expected words as a shell has") from error


def _passed(engine: str, values: Chosen) -> dict[str, object]:
    """Options of the engine's own server without a meaning here, which are passed on unchanged."""
    server = SERVERS.get(engine)
    format_of_files = {ROUNDING: values[ROUNDING]} if engine == "vllm" and values[ROUNDING] in STATED else {}
    return format_of_files | {
        name: values[name]
        for name, flag in FLAGS.items()
        if name in values.given and flag.server == server and isinstance(flag.rule, NoEffect)
    }


def _spoken(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag if value else f"--no-{name.replace('_', '-')}"] if isinstance(value, bool) else [flag, str(value)]
