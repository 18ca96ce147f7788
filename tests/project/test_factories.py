"""Tensors of what a step of the target reaches are made where the others lie, and no value is looked at there.

A tensor without a device lies on the CPU: on CUDA it meets others only when the line runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "sametoken"
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "tril", "zeros"}
LOOKS = {"item", "nonzero", "tolist"}
# What a captured step calls, and what surrounds it in the host's step.
REACHED = [
    "drafters/device.py", "drafters/growing.py", "drafters/padded.py", "drafters/rows.py", "drafters/tree.py",
    "engine/captured.py", "engine/runner.py", "heads/eagle/drafter.py", "heads/medusa/drafter.py",
    "model/attention.py", "runtime/cache.py", "runtime/draw.py", "runtime/graph_slots.py", "speculation/draft.py",
    "speculation/noise.py", "speculation/processors.py", "speculation/sampling.py",
    "speculation/verify.py",
]  # fmt: skip
# Functions whose tensors lie on the CPU whatever the target's device, and those that read a result for the host.
ON_CPU = {"_straightened", "_walk"}
FOR_THE_HOST = {"_remember", "forward", "_paths", "guesses_of", "committed_features"}


def found(name: str, wanted: Callable[[ast.Call, ast.Attribute], bool]) -> list[str]:
    """The calls of methods or of functions of a module that are `wanted`, as file, function and line."""
    tree = ast.parse((PACKAGE / name).read_text())
    lines = (PACKAGE / name).read_text().splitlines()
    places: list[str] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and wanted(node, node.func)
            and function not in ON_CPU | FOR_THE_HOST
        ):
            places.append(f"{name}:{node.lineno} in {function}: {lines[node.lineno - 1].strip()}")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return places


def without_device(call: ast.Call, function: ast.Attribute) -> bool:
    of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch" and function.attr in FACTORIES
    return of_torch and not any(word.arg in ("device", None) for word in call.keywords)


@pytest.mark.parametrize("name", REACHED)
def test_factories_name_a_device(name: str) -> None:
    assert found(name, without_device) == []


@pytest.mark.parametrize("name", REACHED)
def test_no_value_is_looked_at(name: str) -> None:
    assert found(name, lambda _, function: function.attr in LOOKS) == []
