"""`sametoken chat`: a conversation in the terminal, with accepted guesses of the draft in another colour.

Only the answers are written to standard output; prompts, figures and refusals go to standard error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from importlib import import_module
from io import TextIOWrapper

from sametoken.commands.chat_clients import ChatClient, ChatSettings, ColouredText, EngineClient, ServerClient, Turn
from sametoken.commands.options import Option, Values, engine_options, refuse_given, sampling_options, titled
from sametoken.commands.terminal import ACCEPTED
from sametoken.errors import ConfigError, SametokenError

ENGINE = engine_options()
KEY = Option("api_key", str, None, "key of the server at --url.")
OPTIONS = (
    *titled(
        "The conversation",
        Option("url", str, None, "address of a sametoken server that answers instead of a model in this process."),
        KEY,
        Option("system", str, None, "system text, which the model is given before the conversation."),
        Option("max_tokens", int, 512, "number of tokens of an answer at most."),
        *sampling_options("temperature"),
        Option("seed", int, 0, "seed of the draw: the same conversation gives the same answers."),
        Option("plain", bool, False, "begin without drafts; /plain in the conversation changes it."),
        Option("color", bool, True, "show colours in a terminal."),
    ),
    *ENGINE,
)
COMMANDS = (
    "/reset forgets the conversation, /plain turns drafts off or on, /quit or Ctrl-D ends; Ctrl-C stops an answer "
    "or drops a line"
)
EXAMPLES = {
    "talk to the model that comes with the package": "sametoken chat",
    "talk to a model, with a draft": "sametoken chat MODEL --draft DRAFT",
    "talk to a server that runs": "sametoken chat --url http://localhost:8000",
}


def command(model: str | None, values: Values) -> int:
    """Talk to a model in this process, or on a server. Green words were guessed by the draft and accepted."""
    wanted = ("max_tokens", "temperature", "seed")
    settings = ChatSettings({name: values[name] for name in wanted if values[name] is not None}, values["plain"])
    client = _open_client(model, values, settings)
    with asyncio.Runner() as runner:
        try:
            Chat(client, settings, values["system"], values["color"], runner).run()
        finally:
            runner.run(client.close())
    return 0


def _open_client(model: str | None, values: Values, settings: ChatSettings) -> ChatClient:
    if values["url"] is not None:
        refuse_given(ENGINE, values, "a model in this process: leave --url out")
        return ServerClient(values["url"], values["api_key"], model)
    refuse_given([KEY], values, "a server: give --url")
    settings.sampling({})  # a wrong value is refused before a model is loaded
    from sametoken.commands.models import open_llm

    llm = open_llm(model, values)
    if not llm.tokenizer.has_chat_template:
        raise ConfigError("this model has no chat template, so it cannot chat; use sametoken generate")
    return EngineClient(llm)


class Chat:
    """A conversation in a terminal.

    Args:
        client: source of the answers.
        settings: settings of the answers.
        system: system text before the first turn, or None.
        color: True for colours on a terminal.
        runner: runner of one answer at a time, which cancels the answer at Ctrl-C.
    """

    def __init__(
        self, client: ChatClient, settings: ChatSettings, system: str | None, color: bool, runner: asyncio.Runner
    ) -> None:
        from rich.console import Console

        self._client, self._settings, self._runner = client, settings, runner
        self._system: list[Turn] = [] if system is None else [{"role": "system", "content": system}]
        self._turns = list(self._system)
        self._out = Console(highlight=False, no_color=not color, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, no_color=not color, soft_wrap=True)

    def run(self) -> None:
        """Read lines and answer them until the input ends or a command ends the conversation."""
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # invalid bytes shall not end the conversation
        self._note(COMMANDS)
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._run_command(line):
                    break
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """Next line of the user; None at the end of the input."""
        if sys.stdin is None:  # the parent process closed it
            return None
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.strip() if line else None
        with suppress(ImportError):
            import_module("readline")  # makes lines editable
        try:
            return input("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:  # may be meant for an answer that has just ended, so the conversation continues
            self._note("\n/quit or Ctrl-D ends")
            return ""

    def _run_command(self, line: str) -> bool:
        """Run a command of the user; return False if the command ends the conversation."""
        match line.split()[0]:
            case "/quit":
                return False
            case "/reset":
                self._turns = list(self._system)
                self._note("the conversation begins anew")
            case "/plain":
                self._settings.plain = not self._settings.plain
                self._note("drafts are off" if self._settings.plain else "drafts are on")
            case unknown:
                self._note(f"{unknown}: unknown; {COMMANDS}")
        return True

    def _answer(self, asked: str) -> None:
        turns: list[Turn] = [*self._turns, {"role": "user", "content": asked}]
        shown: list[ColouredText] = []
        try:
            self._runner.run(self._show(self._client.answer(turns, self._settings), shown))
        except KeyboardInterrupt:
            self._note("\nstopped")
        except SametokenError as error:
            self._note("\n" * bool(shown) + f"error: {' '.join(str(error).split())}")
        text = "".join(piece.text for piece in shown)
        if text:
            self._turns = [*turns, {"role": "assistant", "content": text}]

    async def _show(self, pieces: AsyncIterator[ColouredText], shown: list[ColouredText]) -> None:
        """Write an answer as it comes, and its figures; `shown` gets the pieces, also those of a partial answer."""
        from rich.text import Text

        async with aclosing(pieces) as coming:  # type: ignore[type-var]
            async for piece in coming:
                shown.append(piece)
                for text, drafted in piece.runs:
                    self._out.print(Text(text, ACCEPTED if drafted else ""), end="")
                self._out.file.flush()
        self._out.print()
        self._note(shown[-1].figures if shown else "no answer")

    def _note(self, words: str) -> None:
        self._err.print(words, style="dim", markup=False)
