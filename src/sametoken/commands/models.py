"""Load an `LLM` from options. All settings are checked before torch is imported or a file is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sametoken import embedded, kinds
from sametoken.checkpoint.paths import user_path
from sametoken.commands.ahead import starting
from sametoken.commands.options import Chosen, Values, settings_of
from sametoken.errors import ConfigError
from sametoken.options.engine import MOST_THREADS, EngineConfig, KVCacheConfig
from sametoken.options.serving import CACHE
from sametoken.options.speculation import AUTO, MODEL_METHODS, SpeculativeConfig

if TYPE_CHECKING:
    from sametoken.engine.llm import LLM


def open_llm(model: str | None, values: Values, *, calibrated: bool = True) -> LLM:
    """Load the engine that the options describe; a named model without a draft gets its own.

    Args:
        calibrated: True to measure the costs of drafts now rather than during the first requests.

    Raises:
        SametokenError: a setting is refused, or the models cannot be loaded together.
    """
    drafting = settings_of(SpeculativeConfig, values)
    if isinstance(values, Chosen):  # only given options are passed, so that the engine chooses the others
        drafting = {name: value for name, value in drafting.items() if name in values.given}
    speculative = SpeculativeConfig(**drafting)
    engine = EngineConfig(**settings_of(EngineConfig, values))
    cache = KVCacheConfig(**settings_of(KVCacheConfig, values, CACHE))
    target, draft = model_names(model, values["draft"], speculative.method)
    use_cpus(values.get("cpus"), values["threads"])

    with starting():
        from sametoken.engine.llm import LLM

        llm = LLM(
            target,
            draft,
            speculative,
            kv_cache=cache,
            revision=values["revision"],
            draft_revision=values["draft_revision"],
            **engine.model_dump(),
        )
    if calibrated and speculative.adaptive:
        llm.engine.calibrate()
    return llm


def join_ranks(values: Values, replicas: int = 1) -> None:
    """Return on rank 0, or if there is one rank; any other rank computes until rank 0 ends, and ends its process.

    Raises:
        ConfigError: a launcher has started the ranks of one model, but several replicas of it are configured.
    """
    if values["tensor_parallel_size"] == 1:
        return
    if replicas > 1:
        from sametoken.parallel.place import place_of

        if launcher := place_of(os.environ, values["tensor_parallel_size"]).launcher:
            raise ConfigError(
                f"{launcher} started the ranks of one model, and --data-parallel-size is {replicas}; start the command "
                f"without {launcher}, which then starts the ranks of each replica itself"
            )
        return
    use_cpus(values.get("cpus"), values["threads"])

    from sametoken.parallel.follow import join

    join(os.environ, values["tensor_parallel_size"])


def use_cpus(cpus: str | None, threads: int | None, part: int = 0, parts: int = 1) -> None:
    """Restrict this process to CPUs, and set the number of its threads.

    Args:
        cpus: list of CPUs in the notation of taskset; None for all.
        threads: number of threads of all parts together, see `use_threads`; None means one per CPU of the list.
        part: number of this process's part of the list, from 0.
        parts: number of equal parts of the list.

    Raises:
        ConfigError: the list is invalid, or has CPUs that this process may not use, or too few.
    """
    if cpus is not None:
        from sametoken.parallel.host import own_cores, pin

        try:
            bounds = [[int(end) for end in piece.split("-", 1)] for piece in cpus.split(",")]
        except ValueError:
            raise ConfigError(f"--cpus {cpus}: expected numbers and ranges, for example 0-15 or 0,2,4") from None
        listed = sorted({cpu for bound in bounds for cpu in range(bound[0], bound[-1] + 1)})
        usable = own_cores()[1]
        if not listed or not {*listed} <= {*usable}:
            allowed = ",".join(map(str, usable)) or "none: this system does not let a process choose"
            raise ConfigError(f"--cpus {cpus}: expected some of those that this process may use, {allowed}")
        if len(listed) < parts:
            raise ConfigError(
                f"--cpus {cpus}: {parts} replicas need at least as many CPUs; give more, or fewer replicas"
            )
        pin(listed[part * len(listed) // parts : (part + 1) * len(listed) // parts])
        threads = threads or len(listed)
    use_threads(threads)


def use_threads(threads: int | None) -> None:
    """Set the number of threads; None means one per core.

    Raises:
        ConfigError: the number is out of range; raised before torch is imported.
    """
    if threads is None:
        return
    if not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"--threads {threads}: expected 1 to {MOST_THREADS}; leave it out for one per core")

    import torch

    torch.set_num_threads(threads)


def model_names(model: str | None, draft: str | None, method: str | None) -> tuple[str, str | None]:
    """Names of the target and the draft to load; a draft that the method would not use is refused or left out."""
    if draft is not None and draft.isdecimal() and not user_path(draft).exists():  # llama-server's --draft
        raise ConfigError(
            f"--draft {draft}: expected a draft model or a head; the number of tokens of a draft is --max-draft-len"
        )
    if draft is not None and method not in (None, AUTO, *MODEL_METHODS):
        raise ConfigError(f"--draft {draft} has no use with --method {method}; leave one of them out")
    target = model or embedded.NAME
    known = embedded.named(target)
    if draft is None and known is not None and known.drafts:
        drafts, methods = [*known.drafts], kinds.aliases("embedded")
        own: dict[str | None, str] = {methods[name][0]: name for name in drafts}
        draft = (own | {None: drafts[0], AUTO: drafts[-1]}).get(method)
    return target, draft
