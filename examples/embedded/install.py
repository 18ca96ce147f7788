"""Puts the trained pair where the package looks for it: weights, configuration and the tokenizer, stored once."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from sametoken.embedded import DRAFT, TARGET


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="directory with target/, draft/ and tokenizer/")
    args = parser.parse_args()
    for directory, sources in ((TARGET, ("target", "tokenizer")), (DRAFT, ("draft",))):
        directory.mkdir(exist_ok=True)
        for file in (file for source in sources for file in sorted((args.work / source).iterdir())):
            shutil.copyfile(file, directory / file.name)
        config = directory / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}, indent=2) + "\n")


if __name__ == "__main__":
    main()
