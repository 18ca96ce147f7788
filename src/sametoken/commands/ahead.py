"""Faster start of commands: torch's largest library is linked while options are parsed, and no cycles are collected.

The import of torch takes 1.1 s. It links `libtorch_cpu` for 0.2 s of these, which needs no Python.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

TURN_S = 0.0005
LIBRARY = Path("lib", "libtorch_cpu.so")
DEVICES = tuple(Path("lib", f"libtorch_{name}.so") for name in ("cuda", "hip", "xpu"))


def link_torch() -> None:
    """Begin to link the library of torch's CPU build on Linux in a thread, before torch is imported.

    The interpreter waits for the thread at its end, because a library must not be unloaded while it is initialised.
    """
    spec = find_spec("torch")
    if sys.platform != "linux" or spec is None:
        return
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if any((place / name).exists() for place in places for name in DEVICES):  # torch itself links their libraries
        return
    link = ctypes.CDLL(None).dlopen  # a foreign function runs without the interpreter's lock
    link.restype, link.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for library in filter(Path.is_file, (place / LIBRARY for place in places)):
        Thread(target=link, args=(os.fsencode(library), os.RTLD_NOW)).start()


@contextmanager
def starting(*, stays: bool = False) -> Iterator[None]:
    """Suspend garbage collection within the block, which makes many lasting objects; saves 0.25 s of a start.

    Threads switch ten times as often, because weights are packed while a server is imported.

    Args:
        stays: True if the objects of the block are needed until the process ends; no later collection visits them.
    """
    was, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.freeze()  # otherwise the first collection would visit all objects
        if not stays:
            gc.unfreeze()  # to the oldest generation
        if was:
            gc.enable()
