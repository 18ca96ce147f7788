"""Resolution of the settings of `sametoken serve`: our options, other servers' options and files, our defaults.

Options have priority over the file; two options that contradict each other are an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sametoken import embedded, kinds
from sametoken.commands.options import Chosen, Option, settings_of, titled
from sametoken.dialects.flags import FLAGS, read_flags
from sametoken.dialects.llama_server import ALONE
from sametoken.dialects.rules import Given, Translation, spelled
from sametoken.dialects.trtllm_yaml import read_file
from sametoken.dialects.vllm import read_json
from sametoken.dialects.vllm_door import STATED
from sametoken.errors import ConfigError, found_wrong
from sametoken.options.engine import EngineConfig
from sametoken.options.server import ServerConfig
from sametoken.options.serving import OPTIONS
from sametoken.options.speculation import AUTO, SpeculativeConfig

FILE, JSON, ROUNDING = "extra_llm_api_options", "speculative_config", "quantization"
HINTS = {name: option.hint for name, option in OPTIONS.items()}
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def foreign_options() -> tuple[Option, ...]:
    """Options of `trtllm-serve`, `vllm serve` and `llama-server` that are not ours too."""
    return (
        *titled(
            "Options of other servers",
            Option(FILE, str, None, "YAML file with TensorRT-LLM's keys; options win over it.", "FILE", ("--config",)),
            Option(JSON, str, None, "how drafts are made, as in vllm serve; replaces that of the file.", "JSON"),
        ),
        *(
            Option(name, flag.kind, None, flag.help, aliases=flag.spellings, hidden=True, alone=ALONE.get(name))
            for name, flag in FLAGS.items()
        ),
    )


class Resolution(NamedTuple):
    """All settings of a server, as our options.

    Attributes:
        values: values of all options, by name.
        methods: methods that are possible for the draft, if the configuration leaves a choice; () leaves none.
        origins: option or key of a file that set each value, for values that were set.
        notes: one sentence for each setting without effect, with the reason.
    """

    values: Chosen
    methods: tuple[str, ...]
    origins: dict[str, str]
    notes: list[str]


def resolve(model: str | None, chosen: Chosen) -> Resolution:
    """Resolve options, files and defaults to one configuration.

    Raises:
        ConfigError: a key or value is unknown or not possible here, or two options contradict each other.
    """
    notes = []
    if (stated := chosen[ROUNDING]) in STATED:
        chosen = Chosen({**chosen, ROUNDING: OPTIONS[ROUNDING].field.default}, chosen.given - {ROUNDING})
        notes = [f"{spelled(ROUNDING)} {stated} has no effect here: the checkpoint states how it is quantised"]
    options, file = _settings_of_options(chosen), _settings_of_file(chosen)
    notes += [*file.notes, *options.notes]
    for name in sorted(file.settings.keys() & options.settings.keys()):
        (ours, origin), (theirs, place) = options.settings[name], file.settings[name]
        if ours != theirs:
            notes.append(f"{place} = {theirs!r} gives way to {origin} = {ours!r}")
    settings = {**file.settings, **options.settings}
    methods = _choice_of_heads(model, settings)
    known = embedded.TARGETS.get(model or embedded.NAME)
    if known is not None and known.drafts and not {"method", "draft"} & settings.keys():
        (method,) = kinds.aliases("embedded")[[*known.drafts][-1]]
        settings["method"] = Given(method, "the target's own head")
    checked = {name: _checked(name, given) for name, given in settings.items()}
    origins = {name: given.origin for name, given in settings.items() if given.value is not None}
    return Resolution(Chosen({**chosen, **checked}, origins), methods, origins, notes)


def check_choice(resolution: Resolution, method: str, mixed: Sequence[str]) -> None:
    """Refuse a draft whose method is not among those that the configuration allows.

    Args:
        method: method of the loaded engine.
        mixed: methods among which "auto" chooses.

    Raises:
        ConfigError: the draft has another method; the message names the configured methods and the draft's.
    """
    found = set(mixed) if method == AUTO else {method}
    if resolution.methods and found.isdisjoint(resolution.methods):
        place = resolution.origins["draft"]
        raise ConfigError(
            f"{place}: the draft is made for method {method!r}, expected {' or '.join(resolution.methods)}; "
            "say what it is, or give another draft"
        )


def _settings_of_options(chosen: Chosen) -> Translation:
    result = read_flags({name: chosen[name] for name in FLAGS if name in chosen.given})
    if chosen[JSON] is not None:
        result.add(read_json(chosen[JSON]))
    ours: dict[str, Any] = dict(chosen)
    for owner in (SpeculativeConfig, EngineConfig, ServerConfig):
        ours |= settings_of(owner, chosen)
    for name in sorted(chosen.given - FLAGS.keys() - {FILE, JSON}):
        result.set(name, ours[name], spelled(name))
    return result


def _settings_of_file(chosen: Chosen) -> Translation:
    if chosen[FILE] is None:
        return Translation()
    drafts, result = read_file(chosen[FILE])
    if chosen[JSON] is None:
        result.add(drafts)
    elif drafts.settings:
        result.notes.append(f"speculative_config of {chosen[FILE]} gives way to {spelled(JSON)}")
    return result


def _choice_of_heads(model: str | None, settings: dict[str, Given]) -> tuple[str, ...]:
    """Possible methods of the draft, if the configured decoding type means several.

    The setting becomes None, so that the draft's files determine the method. Without a draft, which means the
    target's own head, the setting becomes the newest method, and no choice is left.
    """
    stated = settings.get("method")
    if stated is None or not isinstance(stated.value, tuple):
        return ()
    methods: tuple[str, ...] = stated.value
    if "draft" in settings:
        settings["method"] = Given(None, stated.origin)
        return methods
    if (model or embedded.NAME) not in embedded.TARGETS:
        raise ConfigError(f"{stated.origin} needs a head; give its directory or Hub id as speculative_model_dir")
    settings["method"] = Given(methods[0], stated.origin)
    return ()


def _checked(name: str, given: Given) -> Any:
    """Validate the value of a setting; an error names the origin of the value."""
    if name not in HINTS or given.value is None:
        return given.value
    try:
        value = TypeAdapter(HINTS[name], config=STRICT).validate_python(given.value)
    except ValidationError as error:
        raise ConfigError(f"{given.origin} = {given.value!r}: {found_wrong(error.errors()[0])}") from error
    for text in value if isinstance(value, list | tuple) else [value]:
        check_text(text, given.origin)
    return value


def check_text(given: Any, origin: str) -> None:
    """Refuse empty texts, and texts that cannot be encoded in UTF-8; other values pass.

    Args:
        given: value of any type.
        origin: origin of the value, for the error.

    Raises:
        ConfigError: the text is refused.
    """
    if not isinstance(given, str):
        return
    if not given.strip():
        raise ConfigError(f"{origin} is empty; expected a value, or leave it out")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{origin} = {given!r} is not text in UTF-8; expected such text") from error
