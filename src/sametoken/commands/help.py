"""Pages of help: purpose of a command, examples, and options in panels, one panel per group.

An option is shown in one spelling; spellings with underscores and the names in other tools work too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

if TYPE_CHECKING:
    from types import ModuleType

    from rich.console import Console
    from rich.text import Text

    from sametoken.commands.options import Option

WIDEST = 120  # columns; longer lines are hard to read
NAMES = 30  # columns for names and kinds of values, at most; longer ones have a line of their own
OWN, LAST = "Options", "Help and errors"  # titles of options that no declaration groups
ON_OFF = {True: "on", False: "off", None: ""}
VALUES = {str: "TEXT", int: "INTEGER", float: "NUMBER"}


class HelpLine(NamedTuple):
    """Name, kind of the value ("" for none), meaning, and default ("" for none)."""

    name: str
    value: str
    help: str
    default: str = ""


def command_page(context: Any, module: ModuleType) -> str:
    """Help of the command of a module; `context` is the parser's context."""
    ours = {option.name for option in module.OPTIONS}
    panels: dict[str, list[HelpLine]] = {"Arguments": [], OWN: []}
    for option in module.OPTIONS:
        if not option.hidden:
            panels.setdefault(option.group or OWN, []).append(_line_of(option))
    for parameter in context.command.get_params(context):
        if parameter.param_type_name == "argument":
            panels["Arguments"].append(HelpLine(parameter.metavar, "", parameter.help or ""))
        elif parameter.name not in ours and not parameter.hidden:
            panels.setdefault(LAST, []).append(_parsers_line(parameter))
    return _page(context, panels, module.EXAMPLES, getattr(module, "NOTE", ""))


def top_page(context: Any, groups: Mapping[str, Mapping[str, str]], examples: Mapping[str, str]) -> str:
    """Help of the whole program; `groups` have the commands, each with its purpose."""
    panels = {title: [HelpLine(name, "", what) for name, what in group.items()] for title, group in groups.items()}
    panels[OWN] = [_parsers_line(parameter) for parameter in context.command.get_params(context)]
    return _page(context, panels, examples, "`sametoken COMMAND --help` explains a command.")


def _line_of(option: Option) -> HelpLine:
    name = option.spellings[0]
    kind = get_args(option.kind)[0] if get_origin(option.kind) is list else option.kind
    if kind is bool:
        return HelpLine(f"--[no-]{name.partition('/')[0][2:]}", "", option.help, ON_OFF[option.default])
    also = f" Also {option.aliases[0]}." if option.aliases and option.aliases[0].startswith("--") else ""
    default = "" if option.default in (None, (), "") else f"{option.default:{'g' if kind is float else ''}}"
    return HelpLine(name, option.metavar or VALUES[kind], option.help + also, default)


def _parsers_line(parameter: Any) -> HelpLine:
    """Line for an option of the parser itself, such as --help."""
    return HelpLine(", ".join(sorted(parameter.opts, key=len)), "", parameter.help or "")


def _page(context: Any, panels: Mapping[str, Sequence[HelpLine]], examples: Mapping[str, str], note: str) -> str:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False, width=min(WIDEST, shutil.get_terminal_size().columns))
    inside = console.width - 4
    with console.capture() as page:
        console.print(Text(context.get_usage()))
        console.print(Text(f"\n{' '.join((context.command.help or '').split())}\n"))
        for what, line in examples.items():
            console.print(Text.assemble("  ", (f"# {what}", "dim"), "\n  ", (line, "green")), soft_wrap=True)
        console.print()
        for title, rows in panels.items():
            if rows:
                names = min(NAMES, max(len(f"{row.name} {row.value}") for row in rows) + 2)
                lines = Text("\n").join(line for row in rows for line in _lines(console, row, names, inside))
                console.print(Panel(lines, title=Text(title), title_align="left", border_style="dim"))
        if note:
            console.print(Text(note))
    return "\n".join(line.rstrip() for line in page.get().split("\n"))


def _lines(console: Console, row: HelpLine, names: int, width: int) -> Iterator[Text]:
    """Lines of a row in `width` columns, of which `names` are for its name."""
    from rich.text import Text

    said = Text(row.help[:1].upper() + row.help[1:])
    if row.default:
        said.append(f" [default: {row.default}]", "dim")
    name = Text.assemble((row.name, "bold cyan"), " " * bool(row.value), (row.value, "yellow"))
    lines = said.wrap(console, width - names)
    if len(name) <= names - 2:
        name.pad_right(names - len(name))
        yield name + lines.pop(0)
    else:
        yield name
    yield from (Text(" " * names) + line for line in lines)
