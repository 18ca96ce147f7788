"""Starting a command sooner: torch's largest library is linked while options are parsed, and no cycles are collected.

Importing torch takes 1.1 s, of which 0.2 s link `libtorch_cpu`, which needs no Python.
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
    """Begin to link the library of torch's CPU build on Linux in a thread; importing torch finds it linked.

    The interpreter waits for the thread when it ends, since a library may not be taken down while it is set up.
    """
    spec = find_spec("torch")
    if sys.platform != "linux" or spec is None:
        return
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if any((place / name).exists() for place in places for name in DEVICES):  # torch itself brings their libraries
        return
    link = ctypes.CDLL(None).dlopen  # a foreign function, which runs without the lock of the interpreter
    link.restype, link.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for library in filter(Path.is_file, (place / LIBRARY for place in places)):
        Thread(target=link, args=(os.fsencode(library), os.RTLD_NOW)).start()


@contextmanager
def starting(*, stays: bool = False) -> Iterator[None]:
    """Collect no cycles within the block, which makes many objects that stay: a quarter of a second of a start.

    Threads take turns at the interpreter ten times as often, since weights are packed while a server is imported.

    Args:
        stays: what the block made is needed until the process ends, so no later collection visits it.
    """
    was, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.freeze()  # else the first collection would visit them all
        if not stays:
            gc.unfreeze()  # to the oldest generation
        if was:
            gc.enable()
