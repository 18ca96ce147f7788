"""`sametoken train`: training of a head for a target on conversations, in this process or several child processes.

Options may come from a recipe; `--dry-run` prints the plan of the run.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin

from sametoken import embedded
from sametoken.commands.options import AS_JSON, Argument, Chosen, Option, Values, settings_of, settings_options
from sametoken.commands.terminal import tell
from sametoken.errors import ConfigError
from sametoken.interrupt import stop_at_signals
from sametoken.learning.modes import ALIASES, meaning
from sametoken.parallel.place import place_of, started
from sametoken.train.settings import (
    GROUPS,
    DataSettings,
    HeadSettings,
    KeepSettings,
    LossSettings,
    RunSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from sametoken.train.session import RunPlan
    from sametoken.train.trainer import Outcome

OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
AGREED = "chosen for this run"
WORDS = {"true": True, "false": False}
LAST_STEP_S = 600  # seconds for the last step and its checkpoint, after which the launcher kills the processes
PROMISE = "training ends after this step, with a checkpoint"
BASE_MODEL = ("--base-model", "--base_model", "--model-name-or-path", "--model_name_or_path")  # Model Optimizer's
WORKER = "LOCAL_RANK"  # variable that launchers of one process per GPU set


ARGUMENT = Argument(
    list[str],
    "Directory, GGUF file or Hub id of the target; without it: the target that comes with the package ('embedded'). "
    "Also settings as KEY=VALUE, with the keys of a recipe.",
    "MODEL",
    optional=True,
)


def _options() -> Iterator[Option]:
    yield Option("model", str, None, "the same as MODEL.", "MODEL", aliases=BASE_MODEL)
    yield Option(
        "offline_data", str, None, "the same as --data, which it replaces: a directory with hidden states.", "DIR",
        aliases=("--offline-data-path",),
    )  # fmt: skip
    yield Option(
        "config", str, None,
        "recipe: a YAML file with names of options and values, or Model Optimizer's for EAGLE-3 or Medusa. Words "
        "KEY=VALUE replace its values, and options replace both.", "FILE",
    )  # fmt: skip
    yield Option("dry_run", bool, False, "print all settings with their origins, and the steps, and train nothing.")
    yield AS_JSON
    for group in GROUPS:
        for option in settings_options(group):
            launched = option.name == "do_eval"  # launch scripts contain `--do_eval True`
            yield option._replace(type=str, default="True", metavar="True|False") if launched else option


OPTIONS = tuple(_options())
EXAMPLES = {
    "train an EAGLE-3 head": "sametoken train MODEL --mode eagle3 --data answers.jsonl --output-dir head",
    "choose the best head by held-out prompts":
        "sametoken train MODEL --data answers.jsonl --eval-data held-out.jsonl --output-dir head",
    "train on prepared data": "sametoken train MODEL --data prepared --output-dir head",
    "look at the plan of a recipe": "sametoken train --config eagle3.yaml model.model_name_or_path=MODEL --dry-run",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Train a Medusa or EAGLE head, or a draft model, for a target. The target is not changed.

    The best head is in the directory `head` or `draft` of --output-dir, which also has checkpoints, log and curves.
    With --eval-data the best is the one with the greatest acceptance length on held-out prompts. If the command is
    stopped, the same command continues.
    """
    if model is not None and values["model"] is not None:
        raise ConfigError(f"got the models {model} and --model {values['model']}; leave one of them out")
    target = model or values["model"] or embedded.NAME
    settings = _settings({**values, "do_eval": _word("do_eval", values["do_eval"])})
    run = settings[RunSettings]
    if values["dry_run"]:
        _show_plan(target, settings, values)
        return 0
    if run.num_gpu > 1 and not _launched():
        return _start(target, values, run)
    _use_threads(run)
    return _train(target, settings, values["json"])


def complete(words: list[str] | None, values: Chosen) -> tuple[str | None, Chosen]:
    """Model and options, completed by a recipe."""
    if (offline := values["offline_data"]) is not None:
        values = Chosen({**values, "data": offline, "offline_data": None}, (*values.given, "data"))
    return settled(words, values, OPTIONS)


def _show_plan(target: str, settings: dict[type, Any], values: Chosen) -> None:
    from sametoken.train.session import planned

    head, loss, run, keep, data = (settings[group] for group in GROUPS)
    plan = planned(target, TrainingSettings(head, loss, run, keep), data)
    for line in plan.notes:
        tell(line)
    show_plan(target, plan, values)


def _settings(values: Values) -> dict[type, Any]:
    return {group: group(**settings_of(group, values)) for group in GROUPS}


def _word(name: str, given: str) -> bool:
    if given.lower() not in WORDS:
        raise ConfigError(f"--{name} {given}: expected True or False")
    return WORDS[given.lower()]


def _train(target: str, settings: dict[type, Any], as_json: bool) -> int:
    from sametoken.train.evaluate import Asked, evaluator_of
    from sametoken.train.session import train

    head, keep, run = settings[HeadSettings], settings[KeepSettings], settings[RunSettings]
    if head.mode in ALIASES:
        tell(f"mode {head.mode} {meaning(head.mode)}")
    if run.fsdp_transformer_layer_cls_to_wrap is not None and run.fsdp:
        tell(f"a draft is small and sharded whole; {run.fsdp_transformer_layer_cls_to_wrap} is not wrapped")
    evaluator = None
    if keep.eval_data is not None:
        asked = Asked(keep.max_draft_len, keep.eval_tokens, engine={"device": run.device})
        evaluator = evaluator_of(target, keep.eval_data, keep.eval_prompts, asked)
    plan = TrainingSettings(head, settings[LossSettings], run, keep)
    # Launchers pass a signal on that a process may have received already.
    with stop_at_signals(PROMISE if _main() else "", repeats_after_s=3.0 if _launched() else 0.0) as stop:
        try:
            with stop.at_once():
                outcome = train(target, plan, settings[DataSettings], evaluator=evaluator, tell=tell, stop=stop)
        except KeyboardInterrupt:
            if _main():
                tell("interrupted before the first step; the same command begins again, or goes on from a checkpoint")
            return stop.exit_code or 130
    if _main():
        _report(target, keep, outcome, as_json)
    return (stop.exit_code or 143) if outcome.stopped else 0  # or another process had the signal


def _report(target: str, keep: KeepSettings, outcome: Outcome, as_json: bool) -> None:
    """Print the outcome of a run and the next step."""
    if outcome.stopped:
        kept = f"checkpoint-{outcome.steps} is in {keep.output_dir}; " if outcome.steps else ""
        tell(f"stopped after step {outcome.steps} of {outcome.total}; {kept}the same command goes on from there")
    written = outcome.head.exists()
    if as_json:
        print(json.dumps({**outcome._asdict(), "head": str(outcome.head) if written else None}))
    if as_json or not written:
        return
    ended = "stopped early, " if outcome.stopped_early else ""
    best = "" if outcome.best is None else f"held-out acceptance length {outcome.best:.3f}, "
    print(f"{outcome.head}: {ended}{best}{outcome.steps} steps, {outcome.tokens_per_second:.0f} tokens/s")
    if outcome.before is not None:
        plain, rounded = outcome.before
        print(f"it started with {plain:.3f} as it was, and with {rounded:.3f} when it was rounded without training")
    if outcome.best is not None:
        tell(
            f"evaluated on up to {keep.eval_prompts} prompts, as by: sametoken evaluate {outcome.head} "
            f"--target {target} --data {keep.eval_data}"
        )


def _launched() -> bool:
    """Return True if a launcher started this process."""
    return WORKER in os.environ or started(os.environ) > 1


def _main() -> bool:
    return place_of(os.environ, started(os.environ)).rank == 0


def _use_threads(run: RunSettings) -> None:
    import torch

    here = max(run.num_gpu, place_of(os.environ, started(os.environ)).here)
    torch.set_num_threads(run.threads or max(1, (os.cpu_count() or 1) // here))


def _start(target: str, values: Values, run: RunSettings) -> int:
    """Run the command in several processes of one process group; the first failure ends the others."""
    _check_devices(run)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, parse_args
    from torch.distributed.run import run as launch

    # A failed process has printed its error; the launcher would add a traceback of its own.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    launcher = ["--standalone", "--nproc-per-node", str(run.num_gpu)]
    if "--shutdown-timeout" in get_args_parser().format_help():  # torch 2.12; before, it waits for 30 seconds
        launcher += ["--shutdown-timeout", str(LAST_STEP_S)]
    try:
        arguments: Any = [*launcher, "-m", "sametoken.cli", "train", target, *_spelled(values)]
        launch(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return max(1, int(error.get_first_failure()[1].exitcode))  # negative where a signal ended it
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _check_devices(run: RunSettings) -> None:
    """Refuse more processes than there are devices."""
    import torch

    devices = torch.cuda.device_count()
    if run.device != "cpu" and devices and run.num_gpu > devices:
        raise ConfigError(f"--num-gpu {run.num_gpu}: this machine has {devices} GPUs; expected at most so many")


def _spelled(values: Values) -> Iterator[str]:
    """Words of a command line for the options, without the model."""
    for option in OPTIONS:
        value = values[option.name]
        if option.name in ("model", "config") or value == option.default:
            continue
        if option.kind is bool:
            yield f"--{'' if value else 'no-'}{option.name.replace('_', '-')}"
        else:
            yield f"--{option.name.replace('_', '-')}={value}"


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
