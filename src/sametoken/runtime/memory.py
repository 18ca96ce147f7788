"""Memory of this machine and the part available to new tensors, in bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MOST = 0.9  # of the free memory, to leave room for activations
CPU_MOST = 0.25  # of the machine's memory, to leave room for other programs


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
    """Default share of `available_bytes` for a KV cache; on the CPU at most a quarter of the machine's memory."""
    if device.type != "cpu":
        return MOST
    return min(MOST, CPU_MOST * total_bytes() / max(1, available_bytes(device)))


def flush_advice(device: torch.device, needed: int) -> str:
    """Advice to free the file cache on devices that share memory with the host; "" on other devices.

    On the CPU, `available_bytes` counts the file cache as free; the driver of such a device does not.
    """
    if device.type != "cuda" or not torch.cuda.get_device_properties(device).is_integrated:
        return ""
    if not available_bytes(device) < needed <= available_bytes(torch.device("cpu")):
        return ""
    return "the rest is taken by cached files, which this frees: sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"


def total_bytes() -> int:
    """Total memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
