"""Command line: the list of commands, and the conversion of errors to one line and an exit code.

Only the command that is called is imported, so `sametoken --help` needs neither pydantic nor torch.
Exit codes: 0 done, 1 the proof failed or conversations lack answers, 2 a user error, 130 interrupted,
141 the output was closed.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sametoken import __version__
from sametoken.commands.ahead import link_torch
from sametoken.commands.signature import DEBUG, signature
from sametoken.errors import NO_WINDOWS, ConfigError, SametokenError, memory_ran_out

if TYPE_CHECKING:
    from types import ModuleType

# Commands by purpose. A name of two words has a module of its own; names of three words share it (`module_of`).
COMMAND_GROUPS = {
    "Use a model": {
        "generate": "Complete prompts with a target, with or without a draft.",
        "chat": "Talk to a model, and see what the draft guessed.",
        "serve": "Serve a model over HTTP as OpenAI's API does.",
        "deploy plan": "Print the command or files that serve a model and its draft with this or another engine.",
        "deploy two-node": "Serve a model on two hosts, from the checks to the first answer.",
        "deploy dynamo": "Serve a model as a worker of NVIDIA Dynamo.",
    },
    "Look at the gain": {
        "demo": "Show plain and speculative decoding side by side.",
        "verify": "Prove that drafts change no token.",
        "bench": "Measure what drafts gain, in this process or on a server.",
        "bench report": "Draw the figures of runs as a page.",
        "bench compare": "Compare the speed of two results.",
        "bench explain": "Say why a run is fast or slow, and what to set.",
        "doctor": "Explain this machine, a model's memory, a head, or a running server's speculation.",
    },
    "Make a draft": {
        "draft": "Make a head for a model in a given time, by the commands below.",
        "synthesize": "Let the target answer the conversations of a file.",
        "shard": "Cut a file of conversations into shards, or put shards together.",
        "prepare": "Turn conversations into training samples.",
        "train": "Train a head or a draft model for a target.",
        "evaluate": "Measure how many drafted tokens a target accepts.",
        "export": "Write a head for another engine.",
        "quantize": "Write a model with fewer bits that other engines read.",
    },
    "Make a draft with many machines": {
        "deploy slurm synthesize": "Let nodes of Slurm answer shards of conversations.",
        "deploy slurm prepare": "Write the target's hidden states on nodes of Slurm.",
        "deploy slurm train": "Train a head on nodes of Slurm.",
        "deploy ray synthesize": "Let workers of Ray answer shards of conversations.",
        "deploy ray prepare": "Write the target's hidden states on workers of Ray.",
        "deploy ray train": "Train a head on nodes of Ray.",
        "deploy shards": "Answer shards of conversations on this machine, as a node of such a job.",
    },
}
COMMANDS = {name: purpose for group in COMMAND_GROUPS.values() for name, purpose in group.items()}
WITH_TORCH = ("generate", "chat", "serve", "demo", "verify", "bench", "draft", "prepare", "train", "evaluate",
              "quantize")  # fmt: skip
NO_TORCH = re.compile("-h$|--help$|--engine")  # commands that compute nothing in this process
# Other programs, whose whole command lines are accepted, each with the name of its options.
DOORS = {"llama-server": "llama-server", "llama serve": "llama-server", "vllm serve": "vllm serve"}
# Commands of Ollama, llama.cpp, transformers and vLLM, and the nearest ones here.
ELSEWHERE = {
    "run": "chat",
    "complete": "generate",
    "start": "serve",
    "benchmark": "bench",
    "convert": "export",
    "vllm": "vllm serve",
    "llama": "llama serve",
}
EXAMPLES = {
    "see the gain with the embedded models": "sametoken demo",
    "complete a prompt": 'sametoken generate --prompt "Hello, I want to see a movie tonight."',
    "serve a model and its draft": "sametoken serve MODEL --draft DRAFT",
}
LESS_MEMORY = (
    "use smaller batches, a shorter context, less of the memory for the cache (--kv-cache-free-memory-fraction) or "
    "weights in fewer bits; `sametoken doctor MODEL` shows what fits"
)
SHORT = re.compile(r"-[A-Za-z]{2}[\w-]*")
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and raise SystemExit; `arguments` default to those of the process."""
    words = [str(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    debug = [word for word in words[:1] if word == "--debug"]
    for program in DOORS:
        if words[len(debug) :][: (length := len(program.split()))] == program.split():
            words = _through_door(DOORS[program], [*words[len(debug) + length :], *debug])
            break
    build_app()(args=words, prog_name="sametoken")


def _through_door(program: str, arguments: Sequence[str]) -> list[str]:
    """Arguments of `serve` for another program's command line."""
    found: list[str] = []

    def translate() -> int:
        from sametoken.commands.doors import through_door

        found.extend(through_door(program, arguments))
        return 0

    if code := _guarded(translate, debug="--debug" in arguments):
        raise SystemExit(code)
    return found


class CommandList(TyperGroup):
    """Group of all commands; only the command that is called is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Command with the longest matching name; for a common prefix of several commands, print their page."""
        for count in (3, 2, 1):
            name = " ".join(args[:count])
            if name in COMMANDS:
                if name in WITH_TORCH and not any(map(NO_TORCH.match, args)) and not ctx.resilient_parsing:
                    link_torch()
                return name, build_command(name), args[count:]
            below = {each: purpose for each, purpose in COMMANDS.items() if each.startswith(f"{name} ")}
            if below and args[count : count + 1] in ([], ["-h"], ["--help"]):
                self._show_group(ctx, name, below)
            elif below:
                given = " ".join(args[: count + 1])
                ctx.fail(f"No such command '{given}'; expected one of: {', '.join(below)}")
        near = ELSEWHERE.get(args[0]) or next(iter(get_close_matches(args[0], COMMANDS, n=1)), None)
        if near and not ctx.resilient_parsing:  # shell completion
            ctx.fail(f"No such command '{args[0]}'; did you mean '{near}'?")
        return super().resolve_command(ctx, args)

    def _show_group(self, ctx: Any, first: str, commands: dict[str, str]) -> None:
        """Print the page of the commands that begin with this word, and exit."""
        from sametoken.commands.help import top_page

        typer.echo(top_page(ctx, {f"sametoken {first}": commands}, {}))
        ctx.exit()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page of all commands."""
        from sametoken.commands.help import top_page

        formatter.write(top_page(ctx, COMMAND_GROUPS, EXAMPLES))


class Command(TyperCommand):
    """Command whose help page shows its options in groups."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page of this command."""
        from sametoken.commands.help import command_page

        formatter.write(command_page(ctx, module_of(self.name or "")))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an option with several values accepts them as separate words."""
        from sametoken.commands.options import joined_words

        words = joined_words(args, module_of(self.name or "").OPTIONS)
        if (unknown := self._unknown_short(ctx, words)) and not ctx.resilient_parsing:
            ctx.fail(f"No such option: {unknown}")
        return super().parse_args(ctx, words)

    def _unknown_short(self, ctx: Any, words: Sequence[str]) -> str | None:
        """First word of one dash and several letters that is no option; never parsed by its first letter."""
        takes = {
            spelling: not getattr(parameter, "is_flag", True)
            for parameter in self.params
            for spelling in (*parameter.opts, *parameter.secondary_opts)
        }
        value = False
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--"):
                name = f"--{ctx.token_normalize_func(name[2:])}"
            if value:
                value = False
            elif name == "--":
                return None
            elif name in takes:
                value = takes[name] and "=" not in word
            elif SHORT.fullmatch(name):
                return name
        return None


def build_app() -> typer.Typer:
    """Application; the module of a command is imported when it is called."""
    app = typer.Typer(
        cls=CommandList, context_settings=HELP_NAMES, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback(
        invoke_without_command=True,
        help="Speculative decoding that never changes a token (on CUDA: with --deterministic).",
    )(_top)
    for name, purpose in COMMANDS.items():
        app.command(name, help=purpose)(_listed)
    return app


def build_command(name: str) -> Any:
    """Command with its options, for the parser."""
    from sametoken.commands.options import variants

    module = module_of(name)
    known = variants(module.OPTIONS)
    settings = HELP_NAMES | {"token_normalize_func": lambda word: known.get(word, word)}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=Command, help=module.command.__doc__, context_settings=settings)(_function(module))
    return typer.main.get_command(app)


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version and exit.")] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    if version:
        print(f"sametoken {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _listed() -> None:
    """Placeholder in the list of commands for one that was not called."""


def _function(module: ModuleType) -> Callable[..., None]:
    """Function that runs a command's module, with one parameter per option."""

    def run(
        context: typer.Context, argument: Any = None, named: str | None = None, debug: bool = False, **values: Any
    ) -> None:
        from sametoken.commands.fallback import note_of
        from sametoken.commands.options import Chosen, refuse_beyond, spelled_as_option

        def call() -> int:
            if argument is not None and named is not None:
                raise ConfigError(f"got the model twice, {argument} and --model {named}; leave one of them out")
            chosen, model = Chosen(values, given), argument if named is None else named
            if hasattr(module, "complete"):
                model, chosen = module.complete(model, chosen)
            refuse_beyond(module.OPTIONS, chosen)
            note = note_of(context.info_name or "", module, model, chosen)
            computes = "threads" in values  # doctor only plans ranks
            if (
                computes and getattr(module, "computes", bool)(values) and values.get("tensor_parallel_size", 1) > 1
            ):  # before input and files of rank 0 alone
                from sametoken.commands.models import join_ranks

                join_ranks(values, values.get("data_parallel_size", 1))
            if note is not None:
                print(note, file=sys.stderr, flush=True)
            try:
                code: int = module.command(model, chosen)
            except ConfigError as error:
                raise spelled_as_option(error, module.OPTIONS) from error
            return code

        sources = {name: context.get_parameter_source(name) for name in values}
        given = frozenset(name for name, source in sources.items() if source is not None and source.name != "DEFAULT")
        raise SystemExit(_guarded(call, debug or bool(context.find_root().params.get("debug"))))

    run.__signature__ = signature(module)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def module_of(command: str) -> Any:
    """Module with a command's function, OPTIONS and EXAMPLES; for three words one of the JOBS of the first two."""
    first, second, job = [*command.split(), "", ""][:3]
    module = import_module(f"sametoken.commands.{re.sub('[ -]', '_', f'{first} {second}'.strip())}")
    return module.JOBS[job] if job else module


def _guarded(command: Callable[[], int], debug: bool) -> int:
    """Exit code of a command, for every kind of end."""
    try:
        if sys.platform == "win32":
            raise ConfigError(NO_WINDOWS)
        if sys.stdout is None:
            raise ConfigError("standard output is closed; expected a place to write to, for example a file")
        code = command()
        sys.stdout.flush()
    except SametokenError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        if not memory_ran_out(error):
            raise
        if debug:
            traceback.print_exc()
        first = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"error: memory ran out: {first}; {LESS_MEMORY}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        exec("")  # clears Python's mark of an interrupted exec of text, for which `python -m` would end with SIGINT
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if debug:
            traceback.print_exc()
        reason = error.strerror or error
        what = "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"
        print(f"error: {what}: {reason}", file=sys.stderr)
        _drop_output()
        return 2
    return code


def _drop_output() -> None:
    """Redirect stdout to the null device, since Python's last flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> None:
    """Run the command line of this process and exit; a process of several ranks exits at once.

    A thread of gloo may still hold Python objects; releasing them during interpreter shutdown aborts the process
    (PyTorch's pull request 179291).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # errors of ranks are reported by this package
    try:
        main()
    except SystemExit as ended:
        ranks = getattr(sys.modules.get("sametoken.parallel.lead"), "CLOSING", ())
        for close in ranks:
            close()
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and not ranks
        if alone or not isinstance(ended.code, int):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)


if __name__ == "__main__":
    run()
