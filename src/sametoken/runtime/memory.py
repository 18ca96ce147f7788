"""Memory of this machine, and the part of it that new tensors may take. In bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MOST = 0.9  # of what is free, so that activations have room
CPU_MOST = 0.25  # of a machine that computes other things too


def available_bytes(device: torch.device) -> int:
    """Bytes available to new tensors; on the CPU including memory that the system would free from its file cache."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return total_bytes()


def default_share(device: torch.device) -> float:
    """Largest share of `available_bytes` for a KV cache: on the CPU a quarter of the machine's memory."""
    if device.type != "cpu":
        return MOST
    return min(MOST, CPU_MOST * total_bytes() / max(1, available_bytes(device)))


def flush_advice(device: torch.device, needed: int) -> str:
    """Advice to free memory that host and device share from the system's file cache; "" on other devices.

    On the CPU `available_bytes` counts these files as free already; the driver of such a device does not.
    """
    if device.type != "cuda" or not torch.cuda.get_device_properties(device).is_integrated:
        return ""
    if not available_bytes(device) < needed <= available_bytes(torch.device("cpu")):
        return ""
    return "the rest is taken by cached files, which this frees: sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"


def total_bytes() -> int:
    """Memory of the machine in bytes, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
