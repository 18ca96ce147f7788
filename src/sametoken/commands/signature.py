"""Conversion of the options and the argument of a command's module to a function signature for typer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from types import ModuleType

    from sametoken.commands.options import Argument, Option

MODEL = (
    "Directory, GGUF file or Hub id of the target, or 'smollm2' (SmolLM2-135M-Instruct, downloaded once); without it: "
)
EMBEDDED = "the target that comes with the package ('embedded')."
MODEL_SPELLINGS = ("--model", "-m", "--hf-repo", "-hf", "-hfr")  # vLLM's, and llama.cpp's
DEBUG = typer.Option("--debug", help="Show the traceback of an error.")


def signature(module: ModuleType) -> inspect.Signature:
    """Signature of a command for typer: its context, the argument, the options, and --debug."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter("context", kind, annotation=typer.Context),
            *_arguments(module),
            *(inspect.Parameter(o.name, kind, default=o.default, annotation=_annotation(o)) for o in module.OPTIONS),
            inspect.Parameter("debug", kind, default=False, annotation=Annotated[bool, DEBUG]),
        ]
    )


def _arguments(module: ModuleType) -> list[inspect.Parameter]:
    """Positional parameters of a command: the model, or its ARGUMENT; none if ARGUMENT is None."""
    kind = inspect.Parameter.KEYWORD_ONLY
    if not hasattr(module, "ARGUMENT"):
        default = (
            f"{module.DEFAULT!r}, or 'embedded' if that cannot be had." if hasattr(module, "DEFAULT") else EMBEDDED
        )
        spoken: Any = Annotated[str | None, typer.Argument(help=MODEL + default, metavar="MODEL")]
        taken = [inspect.Parameter("argument", kind, default=None, annotation=spoken)]
        if all(option.name != "model" for option in module.OPTIONS):
            spoken = Annotated[str | None, typer.Option(*MODEL_SPELLINGS, help="the same as MODEL.", hidden=True)]
            taken.append(inspect.Parameter("named", kind, default=None, annotation=spoken))
        return taken
    argument: Argument | None = module.ARGUMENT
    if argument is None:
        return []
    spoken = typer.Argument(help=argument.help, metavar=argument.metavar)
    if argument.optional:
        return [inspect.Parameter("argument", kind, default=None, annotation=Annotated[argument.type | None, spoken])]
    return [inspect.Parameter("argument", kind, annotation=Annotated[argument.type, spoken])]


def _annotation(option: Option) -> Any:
    spoken = typer.Option(
        *option.parsed,
        help=option.help,
        metavar=option.metavar,
        autocompletion=_choices(option.metavar) if option.metavar and "|" in option.metavar else None,
        hidden=option.hidden,
    )
    return Annotated[option.kind if option.default is not None else option.kind | None, spoken]


def _choices(metavar: str) -> Callable[[str], list[str]]:
    """Shell completion of a value that is one of several words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in metavar.split("|") if word.startswith(incomplete)]

    return complete
