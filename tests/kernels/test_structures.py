"""Structures of ctypes against those of the C++ headers; the compiler gives sizes and offsets."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sametoken.kernels.cpu import structures

SOURCES = Path(structures.__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")
KINDS = {
    re.sub("^C(?=[A-Z])", "", name): kind
    for name, kind in vars(structures).items()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure
}


def members(name: str) -> list[str]:
    """Names of the members of a C++ structure, in order."""
    bodies = [
        found[1]
        for file in (*SOURCES.glob("*.h"), SOURCES / "decoder.cpp")
        if (found := re.search(rf"^struct {name} \{{(.*?)^\}};", file.read_text(), re.M | re.S))
    ]
    assert len(bodies) == 1, name
    body = re.sub(r"\(\*(\w+)\)\([^;]*\)", r"\1", re.sub(r"//.*", "", bodies[0]))  # pointers to functions
    return [part.split()[-1].strip("*") for each in body.split(";") for part in each.split(",") if part.strip()]


def checks(kinds: dict[str, type[ctypes.Structure]]) -> str:
    """Program that compiles if the structures of both languages agree."""
    lines = ["#include <cstddef>", '#include "decoder.cpp"']
    for name, kind in kinds.items():
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "size of {name}");')
        for theirs, (ours, *_) in zip(members(name), kind._fields_, strict=True):
            lines.append(f'static_assert(offsetof({name}, {theirs}) == {getattr(kind, ours).offset}, "{name}.{ours}");')
    return "\n".join(lines)


def compiled(program: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    flags = [
        "-std=c++17",
        "-fsyntax-only",
        "-Wno-invalid-offsetof",
        "-mavx2",
        "-mfma",
        f"-I{SOURCES}",
        "-x",
        "c++",
        "-",
    ]
    return subprocess.run([COMPILER, *flags], input=program, capture_output=True, text=True, check=False)


pytestmark = pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="needs a C++ compiler for x86-64"
)


def test_every_structure_has_the_compilers_layout() -> None:
    assert len(KINDS) > 15
    assert not (found := compiled(checks(KINDS))).returncode, found.stderr


def test_a_field_of_another_width_is_found() -> None:
    class Gate(ctypes.Structure):
        _fields_ = [("activation", ctypes.c_int64), ("gain", ctypes.c_float), ("limit", ctypes.c_float)]

    found = compiled(checks({"Gate": Gate}))
    assert found.returncode
    assert "Gate.gain" in found.stderr
