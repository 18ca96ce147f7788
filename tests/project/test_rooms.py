"""docs/architecture.md names every room in the order of imports and every module in its room; rooms have budgets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import sametoken

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sametoken.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Rooms\n")[2].partition("\n## ")[0]
# Most lines and files of Python in each room, "" for modules without one. A smaller room gets a smaller budget.
BUDGETS = {
    "": (1550, 9), "bench": (3150, 19), "check": (1600, 11), "checkpoint": (7600, 49), "client": (400, 5),
    "commands": (6600, 47), "control": (1400, 10), "data": (960, 7), "deploy": (2350, 19), "dialects": (2300, 14),
    "drafters": (2000, 17), "embedded": (100, 1), "engine": (6600, 38), "heads": (4900, 59), "kernels": (1650, 14),
    "learning": (1000, 11), "model": (4850, 38), "options": (1650, 13), "parallel": (1750, 14), "prompts": (740, 6),
    "quantise": (950, 9), "replicas": (1100, 10), "runtime": (1050, 12), "server": (9400, 58),
    "speculation": (1400, 11), "train": (5200, 32),
}  # fmt: skip
KINDS = ("eagle", "eagle1", "eagle3", "medusa", "mtp", "draft_model")  # their folders share one list of modules


def names(text: str) -> list[str]:
    """What a list of `a`, `b`: description · `c`: description explains."""
    items = re.split(r" · |\. (?=`)|\.$", text)
    return [name for item in items if ":" in item for name in re.findall(r"`([^`]+)`", item.partition(":")[0])]


def explained(section: str) -> tuple[dict[str, list[str]], list[str]]:
    """The modules that the page explains in each room, and those in the folders of kinds."""
    rooms: dict[str, list[str]] = {}
    kinds = ""
    for bullet in re.split(r"\n(?=- \*\*)", "\n" + section.partition("\n- ")[1] + section.partition("\n- ")[2]):
        title, _, rest = bullet.partition("\n")
        nested = [re.sub(r"\s+", " ", each) for each in re.findall(r"^    - (.*(?:\n      .*)*)", rest, re.M)]
        kinds += "".join(f"{each} · " for each in nested)
        lines = [re.sub(r"\s+", " ", each) for each in re.findall(r"^  - (.*(?:\n    (?!-).*)*)", rest, re.M)]
        owners = re.findall(r"`([a-z_]+)`", title.partition(":")[0])
        rooms[owners[0] if owners else ""] = [name for line in lines for name in names(line)]
    return rooms, names(kinds)


ROOMS, IN_KINDS = explained(SECTION)


def modules(room: str) -> set[str]:
    """Modules and packages of a room, by their paths in it."""
    files = [file for file in (PACKAGE / room).rglob("*.py") if file.name != "__init__.py"]
    return {file.relative_to(PACKAGE / room).with_suffix("").as_posix() for file in files}


def test_the_rooms_stand_in_the_order_of_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    levels = [set(re.findall(r"sametoken\.(\w+)", layer)) for layer in reversed(layers)]
    drawn = SECTION.split("```")[1]
    assert [set(re.findall(r"\w+", level)) for level in drawn.split("->")] == levels
    found = {each.stem for each in PACKAGE.iterdir() if each.is_dir() or each.suffix == ".py"}
    assert set().union(*levels) == {name for name in found if not name.startswith("__")}


@pytest.mark.parametrize("room", [room for room in ROOMS if room])
def test_every_module_is_explained_in_its_room(room: str) -> None:
    folders = {each.relative_to(PACKAGE / room).as_posix() for each in (PACKAGE / room).rglob("*") if each.is_dir()}
    listed = {name for name in ROOMS[room] if "." not in name}
    own = {each for each in modules(room) if each.partition("/")[0] not in KINDS}
    if room == "commands":  # a command needs no line of its own
        listed -= {"cli"}
        own = {
            each for each in own if "\ndef command(" not in (PACKAGE / room / f"{each}.py").read_text(encoding="utf-8")
        }
    assert listed - own - folders == set()
    assert own - listed == set()


def test_every_module_of_a_kind_is_explained() -> None:
    found = {each.partition("/")[2] for each in modules("heads") if each.partition("/")[0] in KINDS}
    assert found == set(IN_KINDS)


def sizes() -> dict[str, tuple[int, int]]:
    """Lines and files of each room."""
    found: dict[str, tuple[int, int]] = {}
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0] if file.parent != PACKAGE else ""
        lines, files = found.get(room, (0, 0))
        found[room] = (lines + len(file.read_text(encoding="utf-8").splitlines()), files + 1)
    return found


def test_no_room_is_larger_than_its_budget() -> None:
    found = sizes()
    assert found.keys() == BUDGETS.keys()
    larger = {
        room: f"got {lines} lines in {files} files, expected at most {BUDGETS[room]}: delete or merge code, or raise it"
        for room, (lines, files) in found.items()
        if lines > BUDGETS[room][0] or files > BUDGETS[room][1]
    }
    assert larger == {}


def test_a_test_file_has_a_name_of_its_own() -> None:
    """Without packages among the tests, pytest refuses the second file of a name."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()
