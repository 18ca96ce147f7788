"""`sametoken quantize`: a checkpoint in a format with fewer bits that other engines read, and a report of its error."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sametoken import embedded
from sametoken.commands.models import use_threads
from sametoken.commands.options import AS_JSON, THREADS, Option, Values
from sametoken.commands.terminal import open_progress
from sametoken.errors import ConfigError, unknown_name
from sametoken.interrupt import stop_at_signals
from sametoken.options.declaration import Positive
from sametoken.options.training import GroupSize, RoundedFormat

if TYPE_CHECKING:
    from sametoken.quantise.report import HeadReport, Report

FORMATS = (*get_args(RoundedFormat), "gguf-q8_0", "gguf-q4_0")
GROUPS = get_args(GroupSize)
OPTIONS = (
    Option("format", str, None, "format that the linear layers are rounded to.", "|".join(FORMATS)),
    Option("output", str, None, "directory to write.", "DIR", ("--out",)),
    Option(
        "data",
        str,
        None,
        "file of JSON lines with conversations, texts or prompts; every third one is held out; without it: our own.",
        "FILE",
    ),
    Option("calibration_tokens", Positive, 8192, "number of tokens that scales are chosen with, at most."),
    Option("held_out_tokens", Positive, 4096, "number of tokens that the loss is measured on, at most."),
    Option(
        "group_size",
        int,
        None,
        "for int4: number of inputs that share a scale; without it: 128.",
        "|".join(map(str, GROUPS)),
    ),
    Option("draft", str, None, "draft model or head, whose acceptance is measured before and after.", "DRAFT"),
    Option("target", str, None, "MODEL is a head for this target; the head's acceptance is measured.", "TARGET"),
    Option("max_draft_len", Positive, 5, "number of tokens of a draft in that measurement, at most."),
    Option("max_tokens", Positive, 64, "number of tokens of each answer in that measurement, at most."),
    Option("overwrite", bool, False, "replace DIR if it is there."),
    Option("revision", str, None, "branch, tag or commit of MODEL on the Hub; without it: its main branch."),
    AS_JSON,
    THREADS,
)
EXAMPLES = {
    "write a model in int4": "sametoken quantize MODEL --format int4 --output model-int4",
    "with what its draft gains": "sametoken quantize MODEL --format int4 --output model-int4 --draft DRAFT",
    "write a head in int8": "sametoken quantize HEAD --target MODEL --format int8 --output head-int8",
}


def command(model: str | None, values: Values) -> int:
    """Write a quantised copy of a model or a head, and report the error of the rounding.

    sametoken and other engines read the copy. Layers are rounded one by one on the CPU: a model needs memory for one
    layer and one file of weights. A head needs --target, and memory for the whole target.
    """
    _check(values)
    use_threads(values["threads"])

    from sametoken.checkpoint.paths import user_path
    from sametoken.checkpoint.places import draft_directory
    from sametoken.files import check_replaceable, write_json
    from sametoken.quantise.report import REPORT

    output = user_path(values["output"])
    check_replaceable(output, replace=values["overwrite"])
    name = model or embedded.NAME
    directory = _directory(model, values)
    _check_output(
        output, {"the model itself": str(directory), "--target": values["target"], "--draft": values["draft"]}
    )
    if values["target"] is not None:
        with stop_at_signals() as stop, stop.at_once():  # as below
            head = _write_head(name, directory, output, values)
        return _print(head, output, values["json"])
    if values["draft"] is not None:
        draft_directory(values["draft"])  # an error of the draft is raised before the work begins
    with stop_at_signals() as stop, stop.at_once():  # a signal ends the work, and partial files are removed
        report, written, prompts = _write(name, directory, output, values)
    write_json(output / REPORT, report.to_json())
    if values["draft"] is not None:
        report = _with_acceptance(report, name, written, prompts, values)
        write_json(output / REPORT, report.to_json())
    return _print(report, written, values["json"])


def _check_output(output: Path, read: Mapping[str, str | None]) -> None:
    """Raise ConfigError if the output directory, which is replaced, is also read."""
    for name, place in read.items():
        if place is not None and output.exists() and output.resolve() == Path(place).expanduser().resolve():
            raise ConfigError(f"--output {output} is {name}; choose another place")


def _print(report: Report | HeadReport, written: Path, as_json: bool) -> int:
    from sametoken.quantise.report import REPORT

    if as_json:
        print(json.dumps({"written": str(written), **report.to_json()}))
        return 0
    for line in [*report.lines(), f"{written}: written in {report.seconds:.0f} s, with {REPORT} beside it"]:
        print(line)
    return 0


def _directory(model: str | None, values: Values) -> Path:
    """Directory of the model or of the head."""
    from sametoken.checkpoint.paths import user_path
    from sametoken.checkpoint.places import draft_directory, target_directory
    from sametoken.heads.read import is_head

    if values["target"] is None:
        if model is not None and is_head(user_path(model)):
            raise ConfigError(f"{model} is a head; give --target, the model that it drafts for")
        return target_directory(model or embedded.NAME, values["revision"])
    if model is None:
        raise ConfigError("--target is for a head, and none is given; expected sametoken quantize HEAD --target MODEL")
    directory = draft_directory(model, values["revision"])
    if not is_head(directory):
        raise ConfigError(f"{model} is no head, which --target is for; leave --target out")
    return directory


def _check(values: Values) -> None:
    """Check all options that can be checked without a model."""
    if values["output"] is None:
        raise ConfigError("got no --output; expected --output DIR")
    if values["format"] not in FORMATS:
        raise ConfigError(unknown_name("--format", str(values["format"]), FORMATS))
    if values["target"] is not None:
        _check_head(values)
    if values["group_size"] is None:
        return
    if values["format"] != "int4":
        raise ConfigError(f"--group-size is for --format int4; leave it out for {values['format']}")
    if values["group_size"] not in GROUPS:
        raise ConfigError(f"--group-size {values['group_size']}: expected one of {', '.join(map(str, GROUPS))}")


def _check_head(values: Values) -> None:
    if values["format"].startswith("gguf"):
        expected = ", ".join(get_args(RoundedFormat))
        raise ConfigError(f"--format {values['format']} is for whole models; expected for a head one of {expected}")
    if values["draft"] is not None:
        raise ConfigError("--draft is for whole models; leave it out: the acceptance of the head itself is measured")


def _write_head(name: str, directory: Path, output: Path, values: Values) -> HeadReport:
    from sametoken.checkpoint.hub import read_config
    from sametoken.checkpoint.places import target_directory
    from sametoken.checkpoint.quantised.write import StoredFormat
    from sametoken.checkpoint.tensors import weight_files
    from sametoken.checkpoint.tokenizer_files import load_tokenizer
    from sametoken.files import new_directory, write_json
    from sametoken.heads.files import HEAD_FILES
    from sametoken.model.config import ModelConfig
    from sametoken.quantise.documents import read_documents
    from sametoken.quantise.head import HeadAndTarget, quantise_head
    from sametoken.quantise.report import REPORT, DraftAcceptance, HeadReport, accepted
    from sametoken.train.evaluate import Asked

    begun, stored = time.monotonic(), StoredFormat(values["format"], values["group_size"])
    target = target_directory(values["target"])
    longest = ModelConfig.from_hf(read_config(target)).max_position
    most = values["calibration_tokens"], values["held_out_tokens"]
    documents = read_documents(values["data"], load_tokenizer(target), longest, most)
    asked = Asked(values["max_draft_len"], values["max_tokens"])
    with new_directory(output, replace=values["overwrite"]) as place:
        written = place / "head"
        layers = quantise_head(
            HeadAndTarget(directory, target, values["target"]), stored, documents.calibration, written
        )
        before, after = (
            accepted(values["target"], str(head), documents.prompts, asked) for head in (directory, written)
        )
        sizes = [sum(file.stat().st_size for file in weight_files(head, HEAD_FILES)) for head in (directory, written)]
        lengths = before.acceptance_length, after.acceptance_length
        report = HeadReport(
            name, values["target"], stored.format, stored.rounding.group, documents.origin,
            *_counts(documents.calibration), sizes[0], sizes[1], time.monotonic() - begun, layers,
            DraftAcceptance(name, *lengths, before.prompts, asked.max_draft_len, asked.tokens),
        )  # fmt: skip
        for file in written.iterdir():
            file.rename(place / file.name)
        written.rmdir()
        write_json(place / REPORT, report.to_json())
    return report


def _write(name: str, directory: Path, output: Path, values: Values) -> tuple[Report, Path, list[list[int]]]:
    """Write the copy; return the report, the written checkpoint or file, and the held-out prompts."""
    from sametoken.checkpoint.tokenizer_files import load_tokenizer
    from sametoken.files import new_directory
    from sametoken.model.formats.rounding import ROUNDINGS
    from sametoken.quantise.documents import read_documents
    from sametoken.quantise.report import Report
    from sametoken.quantise.run import quantise
    from sametoken.quantise.sinks import open_writer
    from sametoken.quantise.source import PlainCheckpoint

    begun = time.monotonic()
    format, source = values["format"], PlainCheckpoint(directory)
    rounding = ROUNDINGS[format]
    rounding = rounding._replace(group=values["group_size"] or rounding.group)
    most = values["calibration_tokens"], values["held_out_tokens"]
    documents = read_documents(values["data"], load_tokenizer(directory), source.config.max_position, most)
    with new_directory(output, replace=values["overwrite"]) as place:
        writer = open_writer(place, source, format, rounding.group)
        with open_progress() as progress:
            task = progress.add_task("quantising blocks", total=source.config.num_layers)
            measured = quantise(source, rounding, documents, writer, lambda: progress.advance(task))
        size = writer.finish()
    report = Report(
        name, format, rounding.group, documents.origin,
        *_counts(documents.calibration), *_counts(documents.held_out),
        measured.before, measured.after, source.size, size, time.monotonic() - begun, measured.layers,
    )  # fmt: skip
    return report, output / writer.name, documents.prompts


def _counts(documents: list[Any]) -> tuple[int, int]:
    return len(documents), sum(map(len, documents))


def _with_acceptance(report: Report, name: str, written: Path, prompts: list[list[int]], values: Values) -> Report:
    from sametoken.quantise.report import DraftAcceptance, accepted
    from sametoken.train.evaluate import Asked

    asked = Asked(values["max_draft_len"], values["max_tokens"])
    before, after = (accepted(target, values["draft"], prompts, asked) for target in (name, written))
    lengths = before.acceptance_length, after.acceptance_length
    found = DraftAcceptance(values["draft"], *lengths, before.prompts, asked.max_draft_len, asked.tokens)
    return replace(report, acceptance=found)
