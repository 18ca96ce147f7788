"""From a request for text to the engine's requests: chat template, token ids, parameters, reader of the reply.

Nothing here waits. A long request is made in a thread, others on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from sametoken.engine.llm import LLM
from sametoken.engine.llm_requests import Prompt
from sametoken.engine.request import Request
from sametoken.errors import RequestError
from sametoken.options.sampling import SamplingParams
from sametoken.server.errors import ApiError, misread
from sametoken.server.reasoning import CONTENT, Splitter, Style, find_style
from sametoken.server.speech import ReplyReader
from sametoken.server.text_request import ChatTalk, TextRequest
from sametoken.server.tools import call_grammar


class Made(NamedTuple):
    """The engine's requests by prompt, then by choice, and what reads the replies to them."""

    requests: list[Request]
    reader: ReplyReader


class Prompts:
    """Makes requests for one engine.

    Args:
        llm: makes what the engine takes. `parser`: how thinking is marked; see `find_style`.
    """

    def __init__(self, llm: LLM, parser: str) -> None:
        self._llm, self._tokenizer = llm, llm.tokenizer
        self._style = find_style(parser, self._tokenizer.chat_templates)
        self._specials = {self._tokenizer.token_text(token) for token in self._tokenizer.special_ids}

    def make(self, asked: TextRequest) -> Made:
        """The requests that the engine takes.

        Raises:
            ApiError, RequestError: the prompt or a parameter cannot be served.
        """
        talk, prompts, reader = asked.conversation, asked.prompts, ReplyReader()
        values = {**self._llm.default_sampling, **asked.values}
        if talk is not None:
            text, ids = self.render(talk, asked.special_tokens, asked.fields["prompt"])
            prompts = [asked.cut(ids, self._llm.max_seq_len)]
            reader = self._reader(talk, text, values)
        elif asked.keep is not None or not asked.special_tokens:
            prompts = [self._cut(prompt, asked) for prompt in prompts]
        return Made(self._llm.requests(prompts, SamplingParams.from_mapping(values)), reader)

    def render(self, talk: ChatTalk, special_tokens: bool, field: str) -> tuple[str, list[int]]:
        """A conversation as the model reads it, and its tokens.

        Args:
            field: what the client calls it.
        """
        options = dict(talk.options)
        if talk.tools.offered:
            if not self._tokenizer.renders_tools:
                words = "tools: the chat template of this model has no place for them; expected a request without"
                raise ApiError(400, words, param="tools")
            options["tools"] = [{"type": "function", "function": each} for each in talk.tools.offered]
        try:
            turns = [turn.for_template() for turn in talk.turns]
            text = self._tokenizer.apply_chat_template(turns, talk.begins, talk.continues, **options)
            return text, self._tokenizer.encode(text, add_special_tokens=special_tokens)
        except (RequestError, RecursionError) as error:
            raise misread(error, field) from error

    def _cut(self, prompt: Prompt, asked: TextRequest) -> list[int]:
        try:
            ids = self._tokenizer.encode(prompt, asked.special_tokens) if isinstance(prompt, str) else list(prompt)
        except RequestError as error:
            raise error.about("prompt") from error
        return asked.cut(ids, self._llm.max_seq_len)

    def _reader(self, talk: ChatTalk, text: str, values: dict[str, Any]) -> ReplyReader:
        """What reads the replies to a conversation that was rendered as `text`; adds to `values` what that needs."""
        tools, opening = talk.tools, None
        waits: Mapping[str, str] = {}
        if (style := self._style) is not None:
            if style.every_mark & self._specials:  # special tokens have to be in the text that is split
                if values.get("skip_special_tokens") is not False:
                    style = style.without(self._specials)
                values["skip_special_tokens"] = False
            opening = partial(style.opening, text, (talk.turns[-1].content or "") if talk.continues else None)
            waits = self._waits(style, opening())
        if tools.required:
            calls = call_grammar(tools.required, self._tokenizer.tags_tool_calls, tools.several)
            values["structured_outputs"] = {"grammar": calls}
        if (grammar := values.get("structured_outputs")) is not None:
            values["structured_outputs"] = {**grammar, **waits}
        names = {each["name"] for each in tools.offered}
        return ReplyReader(names, tools.several, opening, talk.shows_thinking)

    @staticmethod
    def _waits(style: Style, begun: Splitter) -> Mapping[str, str]:
        """What a grammar waits for, as `StructuredOutputs` has it, where the reply begins with thinking."""
        if begun.state == "content":
            return {}
        opens = begun.state == "begin" and style.opens and style.otherwise == CONTENT
        return {"after": style.after, "opens": style.opens} if opens else {"after": style.after}
