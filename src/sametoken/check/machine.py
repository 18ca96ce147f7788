"""Facts of this machine: processor, compiled kernels, torch, memory, the Hub's cache, drafters, versions."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sametoken
from sametoken.checkpoint.hub import cache_directory
from sametoken.kinds import OURS, kinds

PACKAGES = ("torch", "transformers", "tokenizers", "httpx")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of a machine.

    Attributes:
        platform: operating system.
        processor: name of the processor.
        cores: number of logical cores.
        threads: number of computing threads.
        features: features of the processor that compiled kernels can use.
        kernels: name of the loaded compiled kernels; None if torch computes alone, which is slower.
        kernels_missing: reason for no kernels, or None.
        advice: advice to get kernels, with the command, or None.
        torch: version and build of torch, for example "2.13.0+cpu".
        devices: names of the CUDA devices.
        memory: bytes of memory.
        memory_free: available bytes, with the reclaimable file cache.
        cache: directory of the Hub's models.
        cache_free: free bytes in its file system.
        weights: directory of packed weights; None if they are not stored.
        weights_bytes: bytes of all packed weights.
        drafters: distribution that provides each kind of drafter.
        versions: versions of Python, this package and its important dependencies.
    """

    platform: str
    processor: str
    cores: int
    threads: int
    features: tuple[str, ...]
    kernels: str | None
    kernels_missing: str | None
    advice: str | None
    torch: str
    devices: tuple[str, ...]
    memory: int
    memory_free: int
    cache: str
    cache_free: int
    weights: str | None
    weights_bytes: int
    drafters: dict[str, str]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> dict[str, str]:
        """Printed facts by name of the line."""
        kernels = self.kernels or f"none: {self.kernels_missing}; torch computes alone, which is slower"
        found = {
            "processor": f"{self.processor}, {self.cores} cores, {self.platform}",
            "features": ", ".join(self.features) or "none that compiled kernels use",
            "kernels": kernels,
            "to have kernels": self.advice or "",
            "torch": f"{self.torch}, {self.threads} threads",
            "CUDA devices": ", ".join(self.devices) or "none",
            "memory": f"{self.memory_free / GIB:.1f} GiB free of {self.memory / GIB:.1f} GiB",
            "Hub cache": f"{self.cache}, {self.cache_free / GIB:.1f} GiB free",
            "packed weights": f"{self.weights_bytes / GIB:.1f} GiB in {self.weights}" if self.weights else "",
            "drafters": ", ".join(
                name if source == OURS else f"{name} ({source})" for name, source in self.drafters.items()
            ),
            "versions": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
        }
        return {name: words for name, words in found.items() if words}


def describe_machine() -> Machine:
    """Facts of this machine.

    Raises:
        ConfigError: the kernels that SAMETOKEN_NATIVE requires are missing.
    """
    import torch  # here, like the imports below, because `bench --url` imports this module and needs no torch

    from sametoken.checkpoint.weight_cache import weights_directory
    from sametoken.kernels.cpu.variant import status
    from sametoken.runtime.memory import available_bytes, total_bytes

    kernels, cache, weights = status(), cache_directory(), weights_directory()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return Machine(
        platform=platform.platform(),
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        features=kernels.features,
        kernels=kernels.variant,
        kernels_missing=kernels.reason,
        advice=kernels.advice,
        torch=torch.__version__,
        devices=tuple(torch.cuda.get_device_name(index) for index in devices),
        memory=total_bytes(),
        memory_free=available_bytes(torch.device("cpu")),
        cache=str(cache),
        cache_free=shutil.disk_usage(_existing(cache)).free,
        weights=None if weights is None else str(weights),
        weights_bytes=_bytes_in(weights) if weights else 0,
        drafters={kind.name: kind.source for kind in kinds()},
        versions={"sametoken": sametoken.__version__, "python": platform.python_version(), **package_versions()},
    )


def package_versions() -> dict[str, str]:
    """Versions of the installed packages among `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """Name of the processor, or of its architecture if the system has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _existing(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    return next(place for place in (path, *path.parents) if place.exists())


def _bytes_in(directory: Path) -> int:
    """Bytes of all files below a directory; 0 if it does not exist."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
