"""Conversion of a text request to engine requests: chat template, token ids, parameters, and reader of the reply.

Conversations and long prompts are converted in threads, other prompts on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from sametoken.engine.llm import LLM
from sametoken.engine.llm_requests import Prompt
from sametoken.engine.request import Request
from sametoken.errors import CheckpointError, PromptTooLongError, RequestError
from sametoken.options.json_types import MOST_BIAS
from sametoken.options.sampling import SamplingParams
from sametoken.options.server import ServerConfig
from sametoken.server.errors import ApiError, misread
from sametoken.server.fields import WHOLE
from sametoken.server.llama.infill import find_marks, infill_ids
from sametoken.server.reasoning import CONTENT, Splitter, Style, find_style
from sametoken.server.speech import ReplyReader
from sametoken.server.text_request import ChatTalk, Infill, Pieces, TextRequest
from sametoken.server.threads import SideWork, aside
from sametoken.server.tools import call_tag
from sametoken.server.tools_in_text import tools_in_text

MOST_SCORES = 2**19  # log-probabilities of one request, at most, if each token has the whole vocabulary


class Made(NamedTuple):
    """Engine requests of one text request.

    Attributes:
        requests: one for each choice of each prompt, ordered by prompt.
        reader: reader of the replies.
    """

    requests: list[Request]
    reader: ReplyReader


class Prompts:
    """Maker of requests for one engine.

    Args:
        llm: the engine's interface.
        config: configuration of the server, with the defaults of requests.

    Attributes:
        defaults: default sampling parameters.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self._llm, self._tokenizer = llm, llm.tokenizer
        self.defaults = {**llm.default_sampling, **(config.default_sampling or {})}
        self._trusts = config.trust_request_chat_template
        self._template_options = config.default_template_options or {}
        self._most_thinking = config.thinking_token_budget
        self._style = find_style(config.reasoning_parser, self._tokenizer.chat_templates)
        self._marks = find_marks(self._tokenizer)
        self._specials = {self._tokenizer.token_text(token) for token in self._tokenizer.special_ids}

    def make(self, asked: TextRequest) -> Made:
        """Make the engine requests of a text request.

        Raises:
            ApiError, RequestError: the prompt or a parameter is refused.
        """
        talk, reader = asked.conversation, ReplyReader()
        values = {**self.defaults, **asked.values}
        if "shaping" in self.defaults and "shaping" in asked.values:
            values["shaping"] = {**self.defaults["shaping"], **asked.values["shaping"]}
        if values["max_tokens"] is None:
            values["max_tokens"] = self.defaults.get("max_tokens")
        if talk is not None:
            text, ids = self.render(talk, asked.special_tokens, asked.fields["prompt"], whole=asked.keep is None)
            prompts: list[Prompt] = [asked.cut(ids, self._llm.max_seq_len)]
            reader = self._reader(talk, text, values)
        else:
            prompts = [self._plain(prompt, asked, values) for prompt in asked.prompts]
        self._bias(values, asked)
        whole = [name for name in ("logprobs", "prompt_logprobs") if values.get(name) == WHOLE]
        values |= dict.fromkeys(whole, self._llm.config.vocab_size)
        requests = self._llm.requests(prompts, SamplingParams.from_mapping(values))
        for name in whole:
            _check_scores(name, requests, self._llm.config.vocab_size)
        return Made(requests, reader)

    def _plain(self, prompt: Prompt | Pieces | Infill, asked: TextRequest, values: dict[str, Any]) -> Prompt:
        """Convert a prompt to one for the engine; add the stop tokens of a gap to `values`."""
        if not isinstance(prompt, Infill | Pieces):
            as_it_is = isinstance(prompt, str) and asked.keep is None and asked.special_tokens
            return prompt if as_it_is else self._cut(prompt, asked)
        begin = self._tokenizer.encode("", asked.special_tokens)
        if isinstance(prompt, Infill):
            if self._marks is not None:
                values["stop_token_ids"] = [*values.get("stop_token_ids", ()), *self._marks.end_ids]
            return infill_ids(prompt, self._marks, self._encoded, begin, self._llm.max_seq_len)
        first = isinstance(prompt.parts[0], str)
        ids = [self._encoded(part) if isinstance(part, str) else [part] for part in prompt.parts]
        return asked.cut([*(begin if first else ()), *chain.from_iterable(ids)], self._llm.max_seq_len)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False)

    def _bias(self, values: dict[str, Any], asked: TextRequest) -> None:
        """Add the biases of tokens, texts and end tokens to `values`."""
        if not asked.biases and not asked.forbids_end:
            return
        found: dict[int, float] = {}
        for key, bias in asked.biases.items():
            found |= dict.fromkeys([key] if isinstance(key, int) else self._encoded(key), bias)
        eos_ids = self._tokenizer.eos_ids if asked.forbids_end else ()
        values["logit_bias"] = found | dict.fromkeys(eos_ids, -float(MOST_BIAS))

    def render(self, talk: ChatTalk, special_tokens: bool, field: str, *, whole: bool = False) -> tuple[str, list[int]]:
        """Render a conversation with the chat template; return the text and its token ids.

        Args:
            field: name of the conversation's field in the body.
            whole: True if the text must fit the context; False if it may be cut.
        """
        options = {**self._template_options, **talk.options}
        if "chat_template" in options and not self._trusts:
            words = "chat_template: this server renders its own templates alone; start it with "
            raise ApiError(400, words + "--trust-request-chat-template, or leave it out", param="chat_template")
        if talk.tools.offered:
            options["tools"] = [{"type": "function", "function": each} for each in talk.tools.offered]
        try:
            turns = [turn.for_template() for turn in talk.turns]
            if not self._tokenizer.renders_tools:
                turns = tools_in_text(turns, options.pop("tools", ()))
            text = self._tokenizer.apply_chat_template(turns, talk.begins, talk.continues, **options)
            if options.get("enable_thinking") is False and talk.begins and self._style is not None:
                text += self._style.closing(text)
            if whole:
                self._llm.check_length(text)
            self._tokenizer.check_tokenisable(text)
            return text, self._tokenizer.encode(text, add_special_tokens=special_tokens)
        except PromptTooLongError:
            raise
        except (RequestError, RecursionError) as error:
            raise misread(error, field) from error
        except CheckpointError as error:  # the request's template: the model's own were tried at the start
            raise misread(error, "chat_template") from error

    async def rendered(self, talk: ChatTalk, special_tokens: bool, field: str) -> tuple[str, list[int]]:
        """Call `render` in a thread, so that the event loop does not wait."""
        return await aside(SideWork.TEMPLATE, self.render, talk, special_tokens, field)

    def _cut(self, prompt: Prompt, asked: TextRequest) -> list[int]:
        try:
            if isinstance(prompt, str):
                if asked.keep is None:
                    self._llm.check_length(prompt)
                self._tokenizer.check_tokenisable(prompt)
            ids = self._tokenizer.encode(prompt, asked.special_tokens) if isinstance(prompt, str) else list(prompt)
        except RequestError as error:
            raise error.about("prompt") from error
        return asked.cut(ids, self._llm.max_seq_len)

    def _reader(self, talk: ChatTalk, text: str, values: dict[str, Any]) -> ReplyReader:
        """Make the reader of the replies to a conversation rendered as `text`; add needed parameters to `values`."""
        tools, opening = talk.tools, None
        waits: Mapping[str, str] = {}
        if (style := self._style) is not None:
            if style.every_mark & self._specials:  # the splitter needs special tokens in the text
                if values.get("skip_special_tokens") is not False:
                    style = style.without(self._specials)
                values["skip_special_tokens"] = False
            opening = partial(style.opening, text, (talk.turns[-1].content or "") if talk.continues else None)
            thinks = {**self._template_options, **talk.options}.get("enable_thinking") is not False
            waits = self._waits(style, opening(), thinks)
            most = self._most_thinking if talk.most_thinking is None and style.closes else talk.most_thinking
            if most is not None and (bound := style.bound(most, opening())):
                values["thought_bound"] = bound
        if tools.required:
            tagged = self._tokenizer.tags_tool_calls or not self._tokenizer.renders_tools
            values["structured_outputs"] = {"structural_tag": call_tag(tools.required, tagged, tools.several)}
        if (grammar := values.get("structured_outputs")) is not None:
            values["structured_outputs"] = {**grammar, **waits}
        names = {each["name"] for each in tools.offered}
        return ReplyReader(names, tools.several, opening, talk.shows_thinking)

    @staticmethod
    def _waits(style: Style, begun: Splitter, thinks: bool) -> Mapping[str, str]:
        """Fields `after` and `opens` of `StructuredOutputs` for a grammar that begins after the reasoning.

        Args:
            begun: splitter at the beginning of the reply.
            thinks: False if the request turns reasoning off, so that the model does not begin any.
        """
        if begun.state == "content":
            return {}
        if begun.state == "begin" and style.opens and style.otherwise == CONTENT:
            return {"after": style.after, "opens": style.opens} if thinks else {}
        return {"after": style.after}


def _check_scores(name: str, requests: Sequence[Request], size: int) -> None:
    """Refuse log-probabilities of the whole vocabulary for more tokens than `MOST_SCORES` allows.

    Args:
        name: "logprobs" or "prompt_logprobs".
        size: number of tokens in the vocabulary.
    """
    asked = sum(each.room if name == "logprobs" else len(each.prompt_ids) for each in requests)
    if asked * size > MOST_SCORES:
        words = f"-1 is the whole vocabulary, which is reported for at most {MOST_SCORES // size} tokens; got {asked}"
        raise RequestError(words, field=name, advice="ask for fewer tokens or alternatives")
