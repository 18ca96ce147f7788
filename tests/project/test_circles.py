"""No module imports itself through others: grimp's graph of the whole package, imports for types included."""

from __future__ import annotations

from itertools import chain

import pytest

grimp = pytest.importorskip("grimp")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one module: in each, every module imports every other at last."""

    def reached(start: str) -> set[str]:
        found, todo = set(), [start]
        while todo:
            new = imports.get(todo.pop(), set()) - found
            found |= new
            todo += new
        return found

    after = {module: reached(module) for module in imports}
    parts = ({other for other in after[module] if module in after.get(other, ())} for module in imports)
    return sorted({tuple(sorted(part)) for part in parts if part})  # type: ignore[arg-type]


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("sametoken")
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    assert len(imports) > 200
    assert circles(imports) == []


def test_a_circle_would_be_found() -> None:
    straight = {"a": {"b"}, "b": {"c"}, "c": set[str]()}
    assert circles(straight) == []
    assert circles({**straight, "c": {"a"}, "d": {"a"}}) == [("a", "b", "c")]
    assert set(chain.from_iterable(circles({"a": {"a"}}))) == {"a"}
