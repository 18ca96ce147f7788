"""The compiled kernels of arm64 on an x86-64 machine: cross-compiled, run in qemu, called with this process's memory.

`load` gives a `Library` whose calls go to a process of its own, which fetches each piece of memory when it first
touches it and gives the changed ones back (arm_caller.cpp). So every test of the kernels can run with those of arm64,
while torch stays here. qemu computes what the instructions are defined to compute; it says nothing about speed.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import struct
import subprocess
import weakref
from collections.abc import Iterable, Sequence
from ctypes import Array, Structure, addressof, c_float
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from sametoken.kernels.cpu import library as native
from sametoken.kernels.cpu.library import Library

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/arm"
COMPILER, QEMU, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
MISSING = [name for name in (COMPILER, QEMU) if shutil.which(name) is None]
# By variant a processor that has what it needs and nothing that only a better variant may use.
PROCESSORS = {"neon": "cortex-a57", "neon_dot": "neoverse-n1", "neon_bf16": "max"}
PIECE = 2**16  # bytes that are fetched at a time, where they are mapped
FETCH, STORE, DONE = range(3)


@cache
def extensions() -> dict[str, Any]:
    """What setup.py builds on Linux on arm64, by variant."""
    with (
        patch("platform.system", lambda: "Linux"),
        patch("platform.machine", lambda: "aarch64"),
        patch("setuptools.setup") as setup,
        patch.dict(os.environ, {"SAMETOKEN_BUILD_KERNELS": "required"}),
    ):
        here = Path.cwd()
        os.chdir(ROOT)
        try:
            runpy.run_path(str(ROOT / "setup.py"))
        finally:
            os.chdir(here)
    return {each.name.rpartition("_kernels_")[2]: each for each in setup.call_args.kwargs["ext_modules"]}


def compiled(target: Path, sources: Sequence[str], depends: Iterable[str], *flags: str) -> Path:
    """`target`, compiled unless it is newer than what it is made of."""
    made_of = [ROOT / name for name in (*sources, *depends, "setup.py")]
    if not target.exists() or target.stat().st_mtime < max(file.stat().st_mtime for file in made_of):
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, *flags, *sources, "-o", str(fresh)], check=True, cwd=ROOT)
        fresh.replace(target)
    return target


@cache
def load(variant: str) -> Library:
    """A variant in a process of its own, on the least processor that it is for."""
    made = extensions()[variant]
    flags = [*made.extra_compile_args, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    file = compiled(BUILD / f"_kernels_{variant}.so", made.sources, made.depends, *flags)
    caller = compiled(BUILD / "caller", ["tests/arm_caller.cpp"], [], "-std=c++17", "-O2", "-Wall", "-Werror")
    remote = Remote([QEMU, "-L", SYSROOT, "-cpu", PROCESSORS[variant], str(caller), str(file)])
    with patch.object(native.ctypes, "CDLL", lambda path: remote):
        return Library(variant, file)


class Function:
    """One function of the library, as ctypes would give it."""

    def __init__(self, remote: Remote, name: str) -> None:
        self.remote, self.name = remote, name
        self.argtypes: list[Any] = []

    def __call__(self, *arguments: Any) -> int:
        kinds = self.argtypes
        assert len(arguments) == len(kinds), self.name
        return self.remote.call(self.name, list(map(word, kinds, arguments)))


class Remote:
    """The library as ctypes would give it, computed by a process that `command` starts."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        self._start()

    def __getattr__(self, name: str) -> Function:
        if not name.startswith("sametoken_"):
            raise AttributeError(name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def call(self, name: str, words: list[int]) -> int:
        # qemu's own memory must not lie where arguments do; each start puts it elsewhere.
        while overlap(here := mapped("self"), mapped(str(self._process.pid))):
            self._end()
            self._start()
        self._write(name.encode().ljust(32, b"\0") + struct.pack("<12Q", *words, *[0] * (12 - len(words))))
        while True:
            kind, value, size = struct.unpack("<3Q", self._read(24))
            if kind == DONE:
                return int(np.int64(np.uint64(value)))
            if kind == FETCH:
                begin, end = piece_of(here, value)
                self._write(struct.pack("<3Q", FETCH, begin, end - begin) + os.pread(self._memory, end - begin, begin))
            else:
                before, now = np.frombuffer(self._read(2 * size), np.uint8).reshape(2, size)
                memory = np.frombuffer((ctypes.c_uint8 * size).from_address(value), np.uint8)
                memory[before != now] = now[before != now]

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._end = weakref.finalize(self, end, self._process)

    def _write(self, message: bytes) -> None:
        assert self._process.stdin is not None
        while message:
            message = message[self._process.stdin.write(message) :]

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        parts = bytearray()
        while len(parts) < size:
            part = self._process.stdout.read(size - len(parts))
            if not part:
                raise OSError(f"{' '.join(self._command)} ended with status {self._process.wait()}")
            parts += part
        return bytes(parts)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def word(kind: Any, value: Any) -> int:
    """An argument as the 64 bits that a register holds."""
    if kind is c_float:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if isinstance(value, (Structure, Array)):
        return addressof(value)
    return 0 if value is None else int(value) % 2**64


def mapped(process: str) -> list[tuple[int, int]]:
    """Where a process's memory lies, in order."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    bounds = [line.split(maxsplit=1)[0].split("-") for line in lines if "[v" not in line]  # vdso, vvar, vsyscall
    return [(int(begin, 16), int(end, 16)) for begin, end in bounds]


def piece_of(ranges: list[tuple[int, int]], address: int) -> tuple[int, int]:
    """Begin and end of the memory about an address that is fetched in one go; every address in it has the same."""
    found = next(((begin, end) for begin, end in ranges if begin <= address < end), None)
    if found is None:
        raise OSError(f"a kernel read {address:#x}, where no memory is")
    begin = address // PIECE * PIECE
    return max(found[0], begin), min(found[1], begin + PIECE)


def overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    """Whether two lists of ranges have anything in common."""
    both = sorted([*one, *other])
    return any(first[1] > second[0] for first, second in pairwise(both))
