"""Translation of llama-server's command line and environment into words of `sametoken serve`.

The table of its options is llama_server.tsv.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sametoken.dialects.llama_server import rope
from sametoken.dialects.peers import (
    Passage,
    Rule,
    each_of,
    json_object,
    noted,
    read,
    sampling_rule,
    table,
    template_rule,
    variable,
)
from sametoken.dialects.trtllm import NO_DECODING_TYPES
from sametoken.errors import ConfigError

SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama-server's defaults
WORDS = ("--any-model", "--cors-credentials", "--no-metrics")  # our switches that match llama-server's defaults
# Names of each sampler, and the parameters that turn it off if `--samplers` leaves it out.
SAMPLERS: dict[tuple[str, ...], dict[str, float]] = {
    ("penalties",): {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ("top_k", "top-k"): {"top_k": 0},
    ("top_p", "top-p", "nucleus"): {"top_p": 1.0},
    ("min_p", "min-p"): {"min_p": 0.0},
    ("temperature", "temp"): {"temperature": 1.0},
    ("dry",): {"shaping.dry_multiplier": 0.0},
    ("top_n_sigma", "top-n-sigma"): {"shaping.top_n_sigma": -1.0},
    ("typ_p", "typical_p", "typ-p", "typical"): {"shaping.typical_p": 1.0},
    ("xtc",): {"shaping.xtc_probability": 0.0},
}
OFF = ("infill", "adaptive_p", "tfs_z")  # samplers that no option of ours turns on
LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}  # fmt: skip - letters of --sampler-seq
# Types of drafts without one of ours, each with the reason.
NO_SPEC_TYPES = {f"draft-{name}": NO_DECODING_TYPES[name] for name in ("dflash", "dspark")}
WHOLE = ("original_max_position_embeddings",)  # keys of RoPE with whole numbers
STEP = 512  # llama-server's default of -ub: number of tokens of one forward
LEVELS = ("error", "error", "warning", "info", "debug", "debug")  # our log level for each level of llama-server
DEVICES = re.compile(r"cpu|auto|cuda(:\d+)?")  # names of devices here
EIGHT = "q8_0"  # type of its KV cache with the fewest bits that this engine has
COARSER = ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # types of its KV cache with fewer bits than any of ours
OF_PRESETS = {"--port": "8012", "context": "0", "batch": "1024", "micro": "1024"}


def llama_server(arguments: Sequence[str], environ: Mapping[str, str]) -> Passage:
    """Translate llama-server's command line and environment variables.

    Raises:
        ConfigError: an option would change outputs or needs an unsupported feature, or its value is wrong.
    """
    to = Passage(words=[*WORDS], sampling=dict(SAMPLING), seen={"--port": "8080", "origins": "*"})
    # Other code reads these two variables.
    kept = {name: value for name, value in environ.items() if name not in ("HF_TOKEN", "LLAMA_API_KEY")}
    read(table("llama_server"), arguments, kept, RULES, to)
    to.template.setdefault("enable_thinking", True)  # llama-server's default
    _join(to)
    _join_drafts(to)
    _join_rope(to)
    _join_cache(to)
    to.finish()
    return to


def _join(to: Passage) -> None:
    """Add the options that follow from several options of llama-server together."""
    seen = to.seen
    context, slots = int(seen.get("context", 0)), int(seen.get("parallel", -1))
    if slots > 0:
        to.set("--parallel", str(slots))
        if "unified" not in seen:
            context //= slots
    if context > 0:
        to.set("--ctx-size", str(context))
        to.set("--cap-max-seq-len")  # as llama-server does
    steps = [int(seen[name]) for name in ("micro", "batch") if name in seen]
    if "micro" in seen or min(steps, default=STEP) < STEP:
        to.set("--ubatch-size", str(min(steps)))
    if "model" in seen:
        name, given = seen["model"], ":" in seen["model"].rpartition("/")[2]
        file = seen.get("hf_file")
        to.words[:0] = ["--model", f"{name.rpartition(':')[0] if given else name}:{file}" if file else name]
    if "--port" in seen:
        to.set("--port", seen["--port"])
    for origin in filter(None, map(str.strip, seen["origins"].split(","))):
        to.set("--cors-origin", origin)


def _key_file(to: Passage, value: str, spelling: str) -> None:
    try:
        with open(value, encoding="utf-8") as opened:
            keys = [line.strip() for line in opened if line.strip() and not line.startswith("#")]
    except OSError as error:
        raise ConfigError(f"{spelling} {value}: {error.strerror}; give a file with a key in each line") from error
    if not keys:
        raise ConfigError(f"{spelling} {value}: no key in it; put one in each line, or leave the option out")
    for key in keys:
        to.set("--api-key", key)


def _keys(to: Passage, value: str, spelling: str) -> None:
    if not value.replace(",", "").strip():
        raise ConfigError(f"{spelling} {value!r}: no key in it; give keys separated by commas, or leave it out")
    each_of("--api-key")(to, value, spelling)


def _whole(name: str) -> Rule:
    def take(to: Passage, value: str, spelling: str) -> None:
        if not re.fullmatch(r"-?\d+", value):
            raise ConfigError(f"{spelling} {value}: expected a whole number")
        to.seen[name] = value

    return take


def _parallel(to: Passage, value: str, spelling: str) -> None:
    _whole("parallel")(to, value, spelling)
    if int(value) == 0 or int(value) < -1:
        raise ConfigError(f"{spelling} {value}: expected a number of requests at a time, or -1 for our number")


def _threads(to: Passage, value: str, spelling: str) -> None:
    _whole("threads")(to, value, spelling)
    if int(value) > 0:  # else one per core, as without it
        to.set("--threads", value)


def _cache(to: Passage, value: str, spelling: str) -> None:
    to.cached[spelling] = value


def _join_cache(to: Passage) -> None:
    """Choose the one type of keys and values: the wider of the two, and 8 bits in place of fewer."""
    few = (*COARSER, EIGHT)
    wide = [value for value in to.cached.values() if value not in few]
    planes = {spelling[-1] for spelling in to.cached}
    chosen = wide[0] if wide else EIGHT if len(planes) == 2 else "f16"  # llama-server's default
    for spelling, value in to.cached.items():
        if chosen != EIGHT and value in few:
            words = f"kept as {chosen}: keys and values have one type, give it for both"
            to.idle.append(f"{spelling} {value} ({words})")
        elif value in COARSER:
            to.idle.append(f"{spelling} {value} (kept in 8 bits, as {EIGHT})")
    if to.cached:
        to.set("--cache-type-k", chosen)


def _rope(to: Passage, value: str, spelling: str) -> None:
    """Read one key of RoPE; a JSON object has several keys, by our names."""
    option, _, key = spelling.partition(":")
    if value.lstrip().startswith("{"):
        to.rope |= json_object(value, option)
        return
    if key == "rope_type":
        to.rope[key] = "default" if value == "none" else value
        return
    try:
        number = float(value)
    except ValueError as error:
        raise ConfigError(f"{option} {value}: expected a number") from error
    if key == "extrapolation":
        if number not in (-1, 0, 1):
            raise ConfigError(f"{option} {value}: YaRN is applied wholly (1) or not (0); give one of them")
        to.seen[key] = f"{number:g}"
        return
    try:
        to.rope |= rope(key, int(number) if key in WHOLE else number) or {}
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {error}") from error


def _join_rope(to: Passage) -> None:
    """Determine the kind of RoPE as llama.cpp does: YaRN is extrapolation, and no factor is no change of the model."""
    extrapolation = to.seen.get("extrapolation", "-1")
    if extrapolation == "1":
        to.rope["rope_type"] = "yarn"
    elif extrapolation == "0" and to.rope.get("rope_type") == "yarn":
        to.rope["rope_type"] = "linear"
    kind = to.rope.get("rope_type")
    if kind == "default":
        to.rope.pop("factor", None)
    elif kind in ("linear", "yarn") and "factor" not in to.rope:
        del to.rope["rope_type"]


def _drafts(to: Passage, value: str, spelling: str) -> None:
    """Read the types of drafts; those that this engine lacks are left out, since no draft changes a token."""
    named = [name.strip() for name in value.split(",") if name.strip()]
    lacking = [name for name in named if name in NO_SPEC_TYPES]
    to.idle += [f"{spelling} {name} ({NO_SPEC_TYPES[name]})" for name in lacking]
    kept = [name for name in named if name not in lacking]
    if kept or not lacking:
        to.set("--spec-type", ",".join(kept) or value)
    else:
        to.seen["lacking"] = value


def _join_drafts(to: Passage) -> None:
    """Leave out the draft's file and length if they are for types of drafts alone that this engine lacks."""
    for name in ("--draft", "--max-draft-len") if "lacking" in to.seen else ():
        if name in to.words:
            place = to.words.index(name)
            to.idle.append(" ".join(to.words[place : place + 2]))
            del to.words[place : place + 2]


def _stop(to: Passage, value: str, _: str) -> None:
    to.sampling["stop"] = [*to.sampling.get("stop", []), value]


def _preset(to: Passage, value: str, _: str) -> None:
    """Read a preset, whose value is the name of its model, and after a + that of its draft."""
    model, _, draft = (f"ggml-org/{name}:Q8_0" if name else "" for name in value.partition("+"))
    to.seen |= {"model": model, **OF_PRESETS}
    if draft:
        to.set("--draft", draft)


def _sleep(to: Passage, value: str, spelling: str) -> None:
    _whole("sleep")(to, value, spelling)
    if int(value) == 0 or int(value) < -1:
        raise ConfigError(f"{spelling} {value}: expected a number of seconds, or -1 for never")
    if int(value) > 0:
        to.set("--sleep-idle-seconds", value)


def _breaker(to: Passage, value: str, _: str) -> None:
    shaping = to.sampling.setdefault("shaping", {})
    shaping["dry_sequence_breakers"] = [
        *shaping.get("dry_sequence_breakers", []),
        *([value] if value != "none" else []),
    ]


def _switch(*words: str) -> Rule:
    def take(to: Passage, _: str, spelling: str) -> None:
        if not spelling.startswith("--no-"):
            to.words += words

    return take


def _unified(to: Passage, _: str, spelling: str) -> None:
    if not spelling.lstrip("-").startswith("no-"):
        to.seen["unified"] = "on"


def _verbosity(to: Passage, value: str, spelling: str) -> None:
    _whole("verbosity")(to, value, spelling)
    to.set("--log-level", LEVELS[max(0, min(int(value), len(LEVELS) - 1))])


def _device(to: Passage, value: str, spelling: str) -> None:
    if value == "none" or DEVICES.fullmatch(value):
        to.set("--device", "cpu" if value == "none" else value)
    else:
        to.idle.append(f"{spelling} {value}")


def _thinking(to: Passage, value: str, spelling: str) -> None:
    if value not in ("on", "off", "auto"):
        raise ConfigError(f"{spelling} {value}: expected on, off or auto")
    if value != "auto":
        to.template["enable_thinking"] = value == "on"


def _budget(to: Passage, value: str, spelling: str) -> None:
    _whole("thinking")(to, value, spelling)
    if int(value) < -1:
        raise ConfigError(f"{spelling} {value}: expected a number of tokens, 0 for no reasoning, or -1 for no limit")
    if int(value) == 0:
        to.template["enable_thinking"] = False
    elif int(value) > 0:
        to.set("--thinking-token-budget", value)


def _effort(to: Passage, value: str, _: str) -> None:
    if value != "default":
        to.template["reasoning_effort"] = value


def _format(to: Passage, value: str, spelling: str) -> None:
    if value == "deepseek-legacy":
        raise ConfigError(f"{spelling} {value}: reasoning is in one place; give none, auto or deepseek")
    to.set("--reasoning-format", value)


def _log_format(to: Passage, value: str, _: str) -> None:
    to.set("--log-format", "json" if value == "json" else "text")


def _samplers(to: Passage, value: str, spelling: str) -> None:
    named = [name.strip().lower() for name in re.split("[;,]", value) if name.strip()]
    ours = [name for names in SAMPLERS for name in names]
    if unknown := [name for name in named if name not in ours and name not in OFF]:
        raise ConfigError(f"{spelling} {value}: no sampler {unknown[0]!r}; expected some of {', '.join(ours)}")
    for names, off in SAMPLERS.items():
        for name, number in off.items() if not set(names) & set(named) else ():
            folder, _, own = name.rpartition(".")
            (to.sampling.setdefault(folder, {}) if folder else to.sampling)[own] = number
    if without := [name for name in named if name in OFF]:
        to.idle.append(f"{spelling} {';'.join(without)} (off)")


def _letters(to: Passage, value: str, spelling: str) -> None:
    _samplers(to, ";".join(LETTERS.get(letter, letter) for letter in value), spelling)


RULES: Mapping[str, Rule] = {
    "model": noted("model"), "hf_file": noted("hf_file"), "context": _whole("context"), "parallel": _parallel,
    "unified": _unified, "names": each_of("--served-model-name"), "tags": each_of("--model-tags"),
    "keys": _keys, "key_file": _key_file, "origins": noted("origins"), "verbose": _switch("--verbose"),
    "quiet": _switch("--log-level", "error"), "jsonl": _switch("--log-format", "json"), "verbosity": _verbosity,
    "offline": variable("HF_HUB_OFFLINE", "1"), "hf_token": variable("HF_TOKEN"), "device": _device,
    "thinking": _thinking, "budget": _budget, "effort": _effort, "template": template_rule, "sampling": sampling_rule,
    "format": _format, "samplers": _samplers, "letters": _letters,
    "batch": _whole("batch"), "micro": _whole("micro"), "breaker": _breaker, "sleep": _sleep,
    "quiet_slots": _switch("--no-slots"), "log_format": _log_format,
    "threads": _threads, "cache": _cache, "preset": _preset, "rope": _rope, "drafts": _drafts,
    "stop": _stop,
}  # fmt: skip
