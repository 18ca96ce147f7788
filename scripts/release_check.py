"""Refuses distributions that must not be published: another version than the tag's, or a placeholder as address.

python scripts/release_check.py TAG DIRECTORY
"""

from __future__ import annotations

import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]


def faults(tag: str, directory: Path, changelog: str) -> list[str]:
    """What stands against a release, in words; nothing if nothing does.

    Args:
        tag: of the commit, for example "v0.1.0".
        directory: holds the wheels.
        changelog: the text of CHANGELOG.md.
    """
    found = []
    version = tag.removeprefix("v")
    for wheel in sorted(directory.glob("*.whl")):
        with ZipFile(wheel) as packed:
            (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = packed.read(name).decode()
        if (stated := HeaderParser().parsestr(metadata)["Version"]) != version:
            found.append(f"{wheel.name} is version {stated}, the tag is {tag}: correct one of the two")
        if ".invalid/" in metadata:
            found.append(f"{wheel.name} names a placeholder as its address: set REPOSITORY in setup.py")
    if not any(directory.glob("*.whl")):
        found.append(f"{directory} holds no wheel: run make dist")
    if f"## {version}\n" not in changelog:
        found.append(f"CHANGELOG.md has no section '## {version}' without a remark: write it")
    return found


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    found = faults(sys.argv[1], Path(sys.argv[2]), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
