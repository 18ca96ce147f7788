"""`sametoken bench`: measurement of plain and speculative decoding of the same prompts, in this process or on servers.

Exit code 1 if a token differs from plain decoding in this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.checkpoint.paths import user_path
from sametoken.commands.bench_options import COMMON, LISTS, LOCAL, REMOTE, REUSE
from sametoken.commands.models import open_llm
from sametoken.commands.options import Option, Values, numbers, refuse_given
from sametoken.commands.terminal import open_console, open_progress
from sametoken.errors import ConfigError
from sametoken.interrupt import INTERRUPTED, stop_at_signals

if TYPE_CHECKING:
    from sametoken.bench.record import Run
    from sametoken.bench.tables import Table
    from sametoken.bench.workloads import Workload

STOPPED = "stopped by a signal: cells are missing, or have fewer rounds than settings.repeat"
OPTIONS = (*COMMON, *LOCAL, *REMOTE)
EXAMPLES = {
    "measure a model and its draft": "sametoken bench MODEL --draft DRAFT --batch 1,4 --out results",
    "measure a server under load": "sametoken bench --url http://localhost:8000 --concurrency 1,8 --out results",
    "draw the results": "sametoken bench report results",
}


def command(model: str | None, values: Values) -> int:
    """Measure the gain of drafts: acceptance, tokens/s, latencies, speed-up with its confidence interval.

    `sametoken bench report DIR` draws the results of --out, `sametoken bench explain DIR` recommends changes. With
    --url, MODEL is the served name of the model; without it: the first model that the server lists.
    """
    from sametoken.bench.workloads import BUILTIN, read_workload

    _check(values)
    out = _writable(values["out"])
    turns = values["turns"]
    workloads = [
        read_workload(name, values["limit"], values["category"] or (), turns)
        for name in dict.fromkeys(values["workload"] or [BUILTIN])
    ]
    measure = _measure_engine if values["url"] is None else _measure_server
    run, interrupted = measure(model, values, workloads)
    if interrupted and not (run.cells or run.loads):
        print("stopped before a whole round was measured; nothing to show", file=sys.stderr)
        return INTERRUPTED
    code = _print_json(run, out) if values["json"] else _show(run, out, values["explain"])
    if interrupted:
        words = "stopped: the figures above are of the rounds that were whole; run the same command for all of them"
        print(words, file=sys.stderr if values["json"] else sys.stdout)
    return code or INTERRUPTED * interrupted


def _check(values: Values) -> None:
    """Refuse options without a meaning for the measured engine, before anything is loaded."""
    if values["url"] is None:
        refuse_given(REMOTE, values, "measuring a server: give --url too")
    else:
        refuse_given(LOCAL, values, "measuring an engine in this process: leave out --url")


def _writable(out: str | None) -> Path | None:
    """Directory for results, made before the measurement, so that an error does not cost the results."""
    if out is None:
        return None
    path = user_path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; expected a directory that can be written") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--out {out} cannot be written; expected a directory that can")
    return path


def _levels(values: Values) -> dict[str, list[Any]]:
    """Numbers of every option that takes several, ascending; [] for options that were not given."""
    return {
        name: [] if values[name] is None else sorted(numbers(option, values[name])) for name, option in LISTS.items()
    }


def _measure_engine(model: str | None, values: Values, workloads: Sequence[Workload]) -> tuple[Run, bool]:
    levels = _levels(values)
    lengths, branches, batches = levels["max_draft_len"], levels["tree_top_k"], levels["batch"]
    if values["method"] == "none":
        raise ConfigError("--method none has no drafts to measure; plain decoding is always measured beside them")
    chosen = {**values, "max_draft_len": max(lengths), "tree_top_k": max(branches), "max_batch_size": max(batches)}
    llm = open_llm(model, {**chosen, REUSE: False})
    if llm.method == "none":
        raise ConfigError("bench compares with speculative decoding; give --draft PATH, or --method ngram or suffix")

    if len(branches) > 1 and llm.engine.captured is not None:
        raise ConfigError(
            "got several values of --tree-top-k, but a CUDA graph has one shape; give one value or add --no-cuda-graphs"
        )

    import torch

    from sametoken.bench.measure import INTERVAL_RULE
    from sametoken.bench.record import SCHEMA, Run, describe_environment, load_average
    from sametoken.bench.run import Grid, measure_grid
    from sametoken.bench.workloads import FIT_RULE

    grid = Grid(
        lengths,
        branches,
        values["adaptive"],
        batches,
        levels["prompt_len"] or [None],
        levels["temperature"],
        values["max_tokens"],
        values["repeat"],
        values["seed"],
        values["ignore_eos"],
    )
    before, created = load_average(), _now()
    with open_progress() as progress, stop_at_signals() as stop, stop.at_once():
        task = progress.add_task("loading", total=grid.takes(len(workloads)))
        measured = measure_grid(llm, workloads, grid, lambda what: progress.update(task, advance=1, description=what))
    device, dtype = str(llm.engine.table.table.device), str(llm.engine.runner.decoder.dtype).removeprefix("torch.")
    notes = [INTERVAL_RULE, "prefix pages are not reused, and drafters forget earlier outputs before every take"]
    made = Run(
        schema=SCHEMA,
        kind="engine",
        created=created,
        environment=describe_environment(device, dtype, torch.get_num_threads(), before),
        seed=values["seed"],
        settings={**_settings(model, values, (*COMMON, *LOCAL)), "method": llm.method},
        notes=notes + [FIT_RULE] * bool(levels["prompt_len"]) + [STOPPED] * measured.interrupted,
        basis=dict.fromkeys(MEASURED, "measured"),
        cells=measured.cells,
        loads=[],
        mismatches=measured.mismatches,
    )
    return made, measured.interrupted


MEASURED = (
    "tokens_per_second",
    "speed_up",
    "acceptance",
    "ttft_s",
    "inter_token_s",
    "prompt_share",
    "time_share",
    "steps",
    "contexts",
)


def _measure_server(model: str | None, values: Values, workloads: Sequence[Workload]) -> tuple[Run, bool]:
    from sametoken.bench.record import SCHEMA, Run, describe_environment, load_average
    from sametoken.bench.server import NOTES, Target, Visit, measure_loads

    levels = _levels(values)
    visit = Visit(
        target=Target.of(values["url"], values["baseline_url"], values["api_key"] or os.environ.get("OPENAI_API_KEY")),
        model=model,
        closed=levels["concurrency"] or ([] if levels["rate"] else [1]),
        rates=levels["rate"],
        temperatures=levels["temperature"],
        requests=values["requests"],
        output_len=values["max_tokens"],
        repeat=values["repeat"],
        seed=values["seed"],
        timeout=values["timeout"],
        ignore_eos=values["ignore_eos"],
        continuous_usage=values["continuous_usage"],
    )
    before, created = load_average(), _now()
    with open_progress() as progress:
        task = progress.add_task("connecting", total=visit.takes(len(workloads)))
        loads, interrupted = measure_loads(
            visit, workloads, lambda what: progress.update(task, advance=1, description=what)
        )
    estimated = any(load.inter_token_basis == "estimated" for load in loads)
    made = Run(
        schema=SCHEMA,
        kind="server",
        created=created,
        environment=describe_environment(values["url"], None, None, before),
        seed=values["seed"],
        settings=_settings(model, {**values, "api_key": None}, (*COMMON, *REMOTE)),
        notes=[*NOTES, *[STOPPED] * interrupted],
        basis={
            **dict.fromkeys(("tokens_per_second", "latency_s", "ttft_s", "per_token_s", "speed_up"), "measured"),
            "inter_token_s": "estimated" if estimated else "measured",
        },
        cells=[],
        loads=loads,
        mismatches=[],
    )
    return made, interrupted


def _settings(model: str | None, values: Values, options: Sequence[Option]) -> dict[str, Any]:
    return {"model": model or "embedded", **{option.name: values[option.name] for option in options}}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S%z")


def _print_json(run: Run, out: Path | None) -> int:
    """Print the run as one line of JSON, with the content of the file of `--out`."""
    from sametoken.bench.record import RUN, write_run

    if out is not None:
        print(f"written: {write_run(run, out)}", file=sys.stderr)
    print(RUN.dump_json(run).decode())
    return 1 if run.mismatches else 0


def _show(run: Run, out: Path | None, explained: bool) -> int:
    from sametoken.bench.explain import explain
    from sametoken.bench.record import write_run
    from sametoken.bench.tables import tables, verdicts

    # Written first, so that a closed terminal does not cost the results.
    file = write_run(run, out) if out is not None else None
    for table in tables(run):
        print_table(table)
    for text in verdicts(run):
        print(text)
    if explained:
        print(f"\n{explain(run)}\n")
    if file is not None:
        print(f"written: {file}")
    return 1 if run.mismatches else 0


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal allows."""
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    first, *others = table.head
    widest = max(len(row[0]) for row in table.rows)
    grid = Grid(Column(Text(first), min_width=widest), *(Column(Text(name), justify="right") for name in others))
    for row in table.rows:
        grid.add_row(*(Text(word) for word in row))
    print(f"\n{table.title}")
    open_console(200).print(grid)
