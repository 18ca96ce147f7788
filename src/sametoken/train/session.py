"""Setup of a run from names and settings: the target's outer layers, prepared samples, objective and trainer.

The main process first writes files; the others then read them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.places import target_directory
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.errors import ConfigError
from sametoken.files import alone_in
from sametoken.interrupt import Stop
from sametoken.learning.modes import TRAINED, modes_with
from sametoken.learning.objective import Objective, Start
from sametoken.learning.target import OuterLayers
from sametoken.model.config import ModelConfig
from sametoken.options.declaration import Settings
from sametoken.train.dataset.dumps import DumpedStates, has_dumps
from sametoken.train.dataset.extraction import parse_taps
from sametoken.train.dataset.preparation import data_digest, prepare, prepare_rows
from sametoken.train.dataset.prepared import MANIFEST, SAMPLES, Origin, Prepared
from sametoken.train.defaults import Facts, filled
from sametoken.train.parallel import Parallel
from sametoken.train.schedule import rows_of, steps_of_run
from sametoken.train.settings import LONGEST, DataSettings, TrainingSettings
from sametoken.train.targets import BatchSource, check_data, from_disk, one_by_one, read_norm, read_outer, run
from sametoken.train.trainer import Evaluator, Outcome, RunInputs, Trainer

OF_A_HOST = ("output_dir", "data", "device", "threads", "num_gpu", "draft_config")  # may differ between processes
PREPARED = "data"  # prepared samples within the output directory


def train(
    target: str, plan: TrainingSettings, data: DataSettings, *, evaluator: Evaluator | None = None,
    tell: Callable[[str], None] = lambda line: None, stop: Stop | None = None,
) -> Outcome:  # fmt: skip
    """Train a head for a target.

    Args:
        target: directory, Hub id or "embedded".
        plan: settings, in which None is replaced by a default for the data.
        evaluator: function that evaluates a head in a directory on held-out prompts.
        tell: called with progress messages in the main process.
        stop: once true, training ends after the step with a checkpoint.

    Raises:
        SametokenError: a setting, the data, the target or a checkpoint is invalid; no file was overwritten.
    """
    _check(plan)
    run = plan.run
    parallel = Parallel(run.device, run.fsdp, run.fsdp_target, _alike(plan, data))
    with parallel.together():
        directory = target_directory(target)
        parallel.require_equal("files of the target", model_digest(directory))
        samples = _samples(target, directory, plan, data, parallel)
        parallel.require_equal("samples", samples.manifest.files[SAMPLES].sha256)
        with alone_in(user_path(plan.keep.output_dir)) if parallel.main else nullcontext():
            say = tell if parallel.main else lambda line: None
            width = ModelConfig.from_hf(read_config(directory)).hidden_size
            plan, lines = filled(plan, Facts(samples.lengths(), width, parallel.count))
            inputs = _inputs(target, directory, plan, samples, parallel)
            for line in lines:
                say(line)
            return Trainer(plan, inputs, parallel, evaluator, say, Stop() if stop is None else stop).run()


class RunPlan(NamedTuple):
    """Settings and amount of a run that was not started.

    Attributes:
        groups: settings of all groups, completed by the defaults for the data.
        samples, tokens, steps: numbers of samples, of their tokens, and of steps of the optimiser.
        notes: messages about the defaults.
    """

    groups: tuple[Settings, ...]
    samples: int
    tokens: int
    steps: int
    notes: list[str]


def planned(target: str, plan: TrainingSettings, data: DataSettings) -> RunPlan:
    """Settings and amount of a run; conversations are prepared in a temporary directory.

    Raises:
        SametokenError: a setting, the data or the target is invalid.
    """
    _check(plan)
    directory = target_directory(target)
    with TemporaryDirectory() as place:
        elsewhere = plan._replace(keep=plan.keep.model_copy(update={"output_dir": place}))
        lengths = _samples(target, directory, elsewhere, data, Parallel("cpu")).lengths()
    processes = plan.run.num_gpu
    width = ModelConfig.from_hf(read_config(directory)).hidden_size
    plan, notes = filled(plan, Facts(lengths, width, processes))
    steps = steps_of_run(plan.run, len(rows_of(lengths, plan.run, 0)), processes)
    return RunPlan((*plan, data), len(lengths), sum(lengths), steps, notes)


def _alike(plan: TrainingSettings, data: DataSettings) -> dict[str, str]:
    """Options that must be equal in all processes; file names may differ between hosts."""
    groups: tuple[Settings, ...] = (*plan, data)
    options = {name: getattr(group, name) for group in groups for name in type(group).model_fields}
    options |= {name: options[name] is not None for name in ("init_from", "eval_data")}  # a file name, or None
    return {_spelled(name): str(value) for name, value in options.items() if name not in OF_A_HOST}


def _samples(target: str, directory: Path, plan: TrainingSettings, data: DataSettings, parallel: Parallel) -> Prepared:
    """Prepared samples, read from a directory or prepared from conversations by the main process."""
    if data.data is None:
        raise ConfigError("got no --data; expected a file of conversations, or a directory of `sametoken prepare`")
    if (user_path(data.data) / MANIFEST).exists():
        chosen = [name for name, field in DataSettings.model_fields.items() if getattr(data, name) != field.default]
        if unused := [name for name in chosen if name != "data"]:
            raise ConfigError(
                f"--{unused[0].replace('_', '-')} has no use: {data.data} is prepared already; leave it out, or "
                "prepare the data with it"
            )
        return Prepared.open(data.data)
    place = user_path(plan.keep.output_dir) / PREPARED
    dumps = _dumps(directory, plan, data)
    if parallel.main:
        _prepare(target, directory, plan, data, place, dumps)
    parallel.agreed(None)
    if parallel.first_here and not (place / MANIFEST).exists():  # another host, with its own disk
        _prepare(target, directory, plan, data, place, dumps)
    parallel.most(0)
    samples = Prepared.open(place)
    if dumps is not None:
        samples.hidden_states = dumps.over([samples[number].id for number in range(len(samples))], samples.lengths())
    return samples


def _dumps(directory: Path, plan: TrainingSettings, data: DataSettings) -> DumpedStates | None:
    """Hidden states that Model Optimizer wrote, if the data are a directory of them."""
    place = user_path(str(data.data))
    if not has_dumps(place):
        return None
    if not data.end_of_turn:
        raise ConfigError(f"--no-end-of-turn has no use: {place} has loss masks; leave it out")
    config = ModelConfig.from_hf(read_config(directory))
    named, count = getattr(plan.head, "taps", None), config.num_layers
    taps = plan.head.training.taps(count) if named is None else parse_taps(named, count)
    return DumpedStates(place, taps, read_norm(directory, getattr(torch, config.dtype)))


def _prepare(
    target: str, directory: Path, plan: TrainingSettings, data: DataSettings, place: Path, dumps: DumpedStates | None
) -> None:
    config, tokenizer = ModelConfig.from_hf(read_config(directory)), load_tokenizer(directory)
    files = [str(data.data)]
    origin = Origin(
        target=target, target_digest=model_digest(directory), tokenizer_digest=tokenizer.digest(),
        data_sha256=data_digest(files) if dumps is None else dumps.digest(), vocab_size=config.vocab_size,
        max_len=min(plan.run.training_seq_len or LONGEST, config.max_position), end_of_turn=data.end_of_turn,
        all_tokens=data.all_tokens, draft_vocab_size=data.draft_vocab_size, fill_vocabulary=data.fill_vocabulary,
    )  # fmt: skip
    if dumps is None:
        prepare(files, place, tokenizer, origin)
    else:
        prepare_rows(dumps.rows(data.all_tokens), place, tokenizer, origin, lambda: None, files[0])


def _inputs(target: str, directory: Path, plan: TrainingSettings, samples: Prepared, parallel: Parallel) -> RunInputs:
    device = parallel.device
    stated = getattr(torch, ModelConfig.from_hf(read_config(directory)).dtype)
    if device.type == "cpu" and stated == torch.float16:
        stated = torch.bfloat16  # like the engine on that device
    computed = stated if plan.run.dtype == "auto" else getattr(torch, plan.run.dtype)
    objective = _objective(target, directory, plan, samples, read_outer(directory, stated, device), computed)
    if (rewriting := _rewriting(plan)) and samples.hidden_states is not None:
        raise ConfigError(
            f"{rewriting} needs the target, but {samples.directory} holds its hidden states; prepare the data without, "
            "or leave it out"
        )
    return RunInputs(objective, _source(directory, objective, plan, samples, stated, parallel), samples, computed)


def _source(
    directory: Path, objective: Objective, plan: TrainingSettings, samples: Prepared, dtype: torch.dtype,
    parallel: Parallel,
) -> BatchSource:  # fmt: skip
    """Source of the target's hidden states: from disk if they are stored, otherwise by running the target."""
    check_data(directory, objective.taps, samples)
    if samples.hidden_states is not None:
        if plan.run.fsdp_target:
            raise ConfigError(
                f"--fsdp-target shards a target that runs, but {samples.directory} holds its hidden states; leave it "
                "out"
            )
        return one_by_one(from_disk(samples.hidden_states, dtype, parallel.device))
    if plan.run.fsdp_target and parallel.count > 1:
        from sametoken.train.sharded_target import load_sharded, read_in_step

        decoder = load_sharded(directory, objective.outer, dtype, parallel.mesh)
        return read_in_step(decoder, objective.taps, parallel.most)
    return one_by_one(run(directory, objective.taps, max(samples.lengths()), dtype, parallel.device))


def _objective(
    target: str, directory: Path, plan: TrainingSettings, samples: Prepared, outer: OuterLayers, computed: torch.dtype
) -> Objective:
    """Objective of the training. Raises ConfigError for a draft vocabulary if the kind of head has none."""
    vocabulary, head = samples.draft_vocabulary, plan.head
    if vocabulary is not None and not head.training.vocabulary:
        able = " or ".join(mode for mode, each in TRAINED.items() if each.training.vocabulary)
        raise ConfigError(f"a draft vocabulary is for {able} heads; leave --draft-vocab-size out for {head.mode}")
    objective: type[Objective] = head.kind.load(head.training.objective)
    ids = None if vocabulary is None else vocabulary.ids
    run, name = plan.run, head.kind.name
    return objective.new(
        Start(name, head, plan.loss, outer, directory, target, ids, computed, run.seed, run.gradient_checkpointing)
    )


def _check(plan: TrainingSettings) -> None:
    """Raise for settings that contradict each other."""
    loss = plan.loss
    for name, field in type(loss).model_fields.items():
        modes = modes_with("loss", name)
        if modes and plan.head.method not in modes and getattr(loss, name) != field.default:
            spoken = " or ".join(modes)
            raise ConfigError(f"{_spelled(name)} is for --mode {spoken}; leave it out for {plan.head.mode}")
    if (rewriting := _rewriting(plan)) and plan.run.fsdp:
        raise ConfigError(f"{rewriting} needs the whole draft in each process; leave --fsdp out")


def _rewriting(plan: TrainingSettings) -> str:
    """Command line option for on-policy answers if it is on, otherwise ""."""
    name = plan.head.training.rewriting
    return _spelled(name) if name and getattr(plan.loss, name) else ""


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
