"""Options of llama-server and `vllm serve` from those programs' own sources, beside what each becomes here.

    python scripts/peer_options.py llama-server LLAMA_CPP           # reads tools/server/README.md, which is its help
    python scripts/peer_options.py vllm VLLM                        # reads the declarations that its help is made of
    python scripts/peer_options.py --check vllm VLLM

Each table (src/sametoken/dialects/*.tsv) has a line per option: its spellings, what its value is (nothing for a switch,
in brackets where it may be left out, + before it where several words may follow), the variable of the environment,
what it is here (set, none, refused) and how or why. Known lines keep their last two columns; new ones get "?", which a
person replaces. --check fails where the program has an option that the table lacks, or the table has a "?".
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).resolve().parents[1] / "src/sametoken/dialects"
FILES = {"llama-server": "llama_server.tsv", "vllm": "vllm.tsv"}
ROW = re.compile(r"^\| `(-[^`]+)` \| (.*)$")
ENV = re.compile(r"\(env: (\w+)\)")
SPELLING = re.compile(r"(?<!\w)-{1,2}[A-Za-z][\w.+-]*")
OPPOSITES = {"--enable-": "--disable-", "--disable-": "--enable-"}
PARSERS = ("entrypoints/common/cli_args", "engine/arg_utils")  # modules of vLLM


class Found(NamedTuple):
    """An option of a peer: its spellings, what its value is, and its variable of the environment."""

    names: tuple[str, ...]
    value: str
    env: str = ""


def llama_server(sources: Path) -> Iterator[Found]:
    """The options of llama-server."""
    for line in (sources / "tools/server/README.md").read_text(encoding="utf-8").splitlines():
        if (row := ROW.match(line)) is None:
            continue
        said = row[1].replace("\\|", "|")
        names = SPELLING.findall(re.sub(r"[<\[{].*", "", said))
        value = said.removeprefix(", ".join(names)).strip()
        yield Found(tuple(names), value, next(iter(ENV.findall(row[2])), ""))


def vllm(sources: Path) -> Iterator[Found]:
    """The options of `vllm serve`."""
    types = dict(_fields(sources))
    for file in PARSERS:
        tree = ast.parse((sources / "vllm" / f"{file}.py").read_text(encoding="utf-8"))
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            if owner.name in ("BaseFrontendArgs", "FrontendArgs"):
                for name, kind in _own_fields(owner):
                    yield _typed((f"--{name.replace('_', '-')}",), kind)
        kwargs = dict(_groups(tree))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            adds = isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
            if adds and (found := _argument(call, kwargs, types)) is not None:
                yield found


def _argument(call: ast.Call, kwargs: dict[str, str], types: dict[tuple[str, str], str]) -> Found | None:
    """An option from the call that declares it; None for a word without dashes."""
    names = tuple(each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
    if not names or not names[0].startswith("-"):
        return None
    spread = [ast.unparse(each.value) for each in call.keywords if each.arg is None]
    stated = {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg is not None}
    for text in spread:
        if (field := re.search(r"(\w+)\[['\"](\w+)['\"]\]", text)) is not None:
            return _typed(names, types[kwargs.get(field[1], "VllmConfig"), field[2]])
    action = stated.get("action", "")
    if "BooleanOptionalAction" in action:
        return _typed(names, "bool")
    if "store_true" in action:
        return Found(names, "")
    return Found(names, stated.get("metavar", names[0].lstrip("-").replace("-", "_").upper()).strip("'"))


def _groups(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of variables and the class whose fields they hold, from lines such as `a = get_kwargs(B)`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if (made := re.search(r"get_kwargs\((\w+)\)", ast.unparse(node.value))) is not None:
            yield node.targets[0].id, made[1]


def _fields(sources: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """The types of the fields of all configuration classes, by class and name."""
    for file in sorted((sources / "vllm/config").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield from (((node.name, name), kind) for name, kind in _own_fields(node))


def _own_fields(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _typed(names: tuple[str, ...], kind: str) -> Found:
    """An option whose value is of a type, as vLLM's parser makes one of it."""
    value = names[-1 if len(names[0]) < len(names[-1]) else 0].lstrip("-").replace("-", "_").upper()
    members = set(re.split(r"\s*\|\s*", kind))
    if members == {"bool", "str", "None"}:
        return Found(names, f"[{value}]")
    if "bool" in members:
        longs = [name for name in names if name.startswith("--")]
        no = [f"--no-{name[2:]}" for name in longs]
        other = [
            new + name.removeprefix(old) for name in longs for old, new in OPPOSITES.items() if name.startswith(old)
        ]
        return Found((*names, *no, *other), "")
    several = any(re.match(r"(list|set|tuple)\[", each) for each in members)
    single = {"--allowed-origins", "--allowed-methods", "--allowed-headers", "--middleware"} & set(names)
    return Found(names, f"+{value}" if several and not single else value)


READERS = {"llama-server": llama_server, "vllm": vllm}


def main() -> int:
    """Renews or checks a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=FILES)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    table = TABLES / FILES[given.peer]
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    known = [line for line in lines if line and not line.startswith("#")]
    decided = {name: line.split("\t")[3:] for line in known for name in line.partition("\t")[0].split(",")}
    found = list(dict.fromkeys(READERS[given.peer](given.sources)))
    missing = [",".join(row.names) for row in found if not set(row.names) <= decided.keys()]
    if given.check:
        open_ = [line.partition("\t")[0] for line in known if line.split("\t")[3] == "?"]
        print("\n".join([*missing, *open_]) or "complete")
        return bool(missing or open_)
    rows = [
        "\t".join(
            [",".join(row.names), row.value, row.env, *next(filter(None, map(decided.get, row.names)), ["?", ""])]
        )
        for row in found
    ]
    spelled = {name for row in found for name in row.names}
    older = [line for line in known if not set(line.partition("\t")[0].split(",")) & spelled]
    head = [line for line in lines if line.startswith("#")]
    table.write_text("\n".join([*head, *rows, *older]) + "\n", encoding="utf-8")
    print(f"{len(found)} options, {len(missing)} of them new, {len(older)} older ones kept")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
