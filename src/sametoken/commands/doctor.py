"""`sametoken doctor`: description of this machine; of a head: its kind, the engines that run it, and its acceptance.

For a model see `doctor_memory`, which forecasts its memory; for a running server see `doctor_server`, which reports if
speculation pays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sametoken import embedded
from sametoken.commands import doctor_memory, doctor_server
from sametoken.commands.options import Argument, Option, Values, refuse_given, titled
from sametoken.commands.terminal import open_console
from sametoken.errors import ConfigError
from sametoken.options.declaration import Positive
from sametoken.options.sampling import SamplingParams
from sametoken.options.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from sametoken.check.diagnosis import Diagnosis, ReadingResult

ARGUMENT = Argument(
    str,
    "directory, training run or Hub id of a head, of any trainer, or a model; without it: this machine.",
    "HEAD",
    True,
)
OF_A_HEAD = (
    *titled(
        "A head",
        Option("target", str, None, "the model that the head drafts for: directory, Hub id or 'embedded'.", "MODEL"),
        Option("measure", bool, True, "run built-in prompts through the engine, with each meaning of the layer ids."),
        Option("num_prompts", Positive, 20, "number of prompts to run."),
        Option("max_tokens", int, 64, "number of tokens to generate per prompt, at most."),
        Option("max_draft_len", int, 5, "number of tokens of each draft."),
        Option("temperature", float, 0.0, "randomness of the draw; 0 is greedy."),
        Option(
            "dtype",
            str,
            "auto",
            "number format of weights and activations while measuring.",
            "auto|float32|bfloat16|float16",
        ),
        Option("device", str, "auto", "where to measure: auto, cpu or cuda[:N]."),
    ),
    Option("json", bool, False, "print one JSON object instead of tables."),
)
OPTIONS = (*OF_A_HEAD, *doctor_memory.OPTIONS, *doctor_server.OPTIONS)

HEAD_ALONE = ("measure", "num_prompts", "max_tokens", "temperature")
FOR_A_HEAD = "a head: give one as HEAD, and --target"
TABLE_WIDTH = 110
EXAMPLES = {
    "describe this machine": "sametoken doctor",
    "say how much memory a model takes": "sametoken doctor MODEL --draft DRAFT --max-batch-size 8",
    "examine a head": "sametoken doctor HEAD --target MODEL",
    "say whether a server's speculation pays": "sametoken doctor --url http://localhost:8000",
}


def command(name: str | None, values: Values) -> int:
    """Explain this machine: processor, compiled kernels, torch, memory, versions. Or, with HEAD, a head or a model.

    Of a head: kind, layer convention, norms, RoPE, vocabulary, engines, and its acceptance. Of a model: the memory of
    weights, KV cache and activations, and changes that make it fit. With --url, a running server of sametoken, vLLM or
    SGLang: if its speculation pays, and recommended changes.
    """
    if values["url"] is not None:
        if name is not None:
            raise ConfigError(f"HEAD is {name!r} and --url is {values['url']!r}; give one of them")
        here = [option for option in (*OF_A_HEAD, *doctor_memory.OPTIONS) if option.name != "json"]
        refuse_given(here, values, "files on this machine: leave out --url")
        return doctor_server.print_server(values)
    refuse_given(doctor_server.OPTIONS, values, "a running server: give --url")
    if name is None:
        return _machine(values)
    if values["target"] is None and _is_model(name):
        refuse_given([option for option in OF_A_HEAD if option.name in HEAD_ALONE], values, FOR_A_HEAD)
        return doctor_memory.print_memory(name, values)
    refuse_given(doctor_memory.OPTIONS, values, "a model: leave out --target")
    if values["target"] is None:
        raise ConfigError("--target is missing; expected the model that the head drafts for")
    params = SamplingParams(max_tokens=values["max_tokens"], temperature=values["temperature"], seed=0)
    # A fixed draft length, because the controller would stop drafting with a head of low acceptance.
    speculative = SpeculativeConfig(max_draft_len=values["max_draft_len"], adaptive=False)

    from sametoken.check.diagnosis import Trial, advise, diagnose, measure_acceptance
    from sametoken.checkpoint.hub import read_config
    from sametoken.checkpoint.places import draft_directory, target_directory
    from sametoken.model.config import ModelConfig

    target = embedded.target(values["target"])
    shape = ModelConfig.from_hf(read_config(target_directory(target)))
    found, loaded = diagnose(draft_directory(name), shape)
    if not values["json"]:
        _show(found)
    engine = {"speculative": speculative, "dtype": values["dtype"], "device": values["device"]}
    trial = Trial(target, shape, params, values["num_prompts"], engine)
    accepted = list(measure_acceptance(found, loaded, trial)) if values["measure"] else []
    advice = advise(accepted)
    if values["json"]:
        print(json.dumps(found.to_json(accepted, advice)))
    elif accepted:
        _show_acceptance(accepted, values["num_prompts"], advice)
    return 0


def _is_model(name: str) -> bool:
    """Return True if a name belongs to a whole model rather than to a head."""
    from sametoken.checkpoint.contents import architectures, trained_part
    from sametoken.checkpoint.hub import read_json, resolve
    from sametoken.heads.read import is_head
    from sametoken.model.families import FAMILIES

    place = resolve(embedded.target(name) if name == embedded.NAME else embedded.draft(name), weights=False)
    if trained_part(place) is not None or is_head(place):
        return False
    return any(each in FAMILIES for each in architectures(read_json(place / "config.json") or {}))


def _machine(values: Values) -> int:
    from sametoken.check.machine import describe_machine

    refuse_given([option for option in OF_A_HEAD if option.name != "json"], values, "a head: give HEAD too")
    refuse_given(doctor_memory.OPTIONS, values, "a model: give MODEL too")
    machine = describe_machine()
    if values["json"]:
        print(json.dumps(machine.to_json()))
        return 0
    _print_rows(machine.rows())
    return 0


def _show(found: Diagnosis) -> None:
    from rich.table import Table

    _print_rows({"head": found.head, "kind": found.kind, "made by": found.producer, **found.facts})
    engines = Table("engine", "runs it")
    for engine, reasons in found.engines.items():
        engines.add_row(engine, f"no: {'; '.join(reasons)}" if reasons else "yes")
    open_console(TABLE_WIDTH).print(engines)
    for note in found.notes:
        print(f"note: {note}")


def _show_acceptance(accepted: Sequence[ReadingResult], prompts: int, advice: str | None) -> None:
    from rich.table import Table

    table = Table("layers", "reading", "acceptance length", "acceptance rate", "tokens it can guess")
    for item in accepted:
        layers = ", ".join(map(str, item.reading.taps)) or "last"
        table.add_row(layers, item.reading.name, f"{item.length:.2f}", f"{item.rate:.1%}", f"{item.covered:.1%}")
    open_console(TABLE_WIDTH).print(table)
    print(f"over {prompts} prompts, drafts of fixed length")
    if advice:
        print(advice)


def _print_rows(rows: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for key, value in rows.items():
        table.add_row(key, Text(value))
    open_console(TABLE_WIDTH).print(table)
