"""Conversion between text and token ids, with exactly the results of transformers.

`tokenizer_files` reads a tokenizer from a directory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from sametoken.checkpoint.chat import (
    Marked,
    Message,
    Templates,
    read_template,
    render,
    render_marked,
    render_open,
    try_templates,
)
from sametoken.checkpoint.tokenizer_trial import TextCost, worded
from sametoken.errors import (
    CheckpointError,
    PromptTooLongError,
    RequestError,
    shown,
)

USUAL_CLASS = "PreTrainedTokenizerFast"  # transformers' class if the settings name none
SPACE_SIGN = "\u2581"  # SentencePiece's space
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
LONG_TEXT = 20_000  # characters; while longer texts are tokenised, other threads run

SHRINKS = 4  # greatest factor by which normalisation shortens a text
BEGINNING = 16  # characters per token of the context that are tokenised first of a much longer text
WORDS = "Hello, world: it's 2024!\n\t\u00e9 \u6f22\u5b57"  # text on which every tokenizer is tried
MOST_TOKENS = 256  # most tokens of this text, with special tokens


class Tokenizer:
    """Tokenizer of a checkpoint, with its chat templates.

    Attributes:
        vocab_size: highest token id plus one; a model may have padding rows beyond it.
        added_ids: ids of tokens that are no result of training, `special_ids` among them.
        special_ids: ids of control tokens, which `decode` leaves out.
        bos_id: id of the token at the beginning of prompts, or None.
        eos_ids: ids that end a generation: the tokenizer's own first, then those of generation_config.json and
            config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        templates: Templates,
        eos_ids: Sequence[int] = (),
        kind: str = USUAL_CLASS,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = special_tokens
        self._templates, self._kind = templates, kind
        own_eos = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
        self.bos_id: int | None = (
            backend.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
        )
        self.eos_ids = tuple(dict.fromkeys([*([] if own_eos is None else [own_eos]), *eos_ids]))
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._byte_level = _byte_signs() if b'"ByteLevel"' in decoder else None
        self._space_signs = SPACE_SIGN.encode() in decoder or b'"Metaspace"' in decoder
        vocabulary: dict[str, int] = backend.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._longest = max(map(len, map(str.encode, vocabulary)), default=1)
        self._cost = TextCost(backend)

    def with_chat_template(self, given: str) -> Tokenizer:
        """Return this tokenizer with another chat template, given as in `read_template`.

        Raises:
            CheckpointError: the file cannot be read, or the template is not valid.
        """
        return Tokenizer(
            self._backend, self._special_tokens, {"default": read_template(given)}, self.eos_ids, self._kind
        )

    def check_rows(self, rows: int, where: object) -> None:
        """Check that a model has an embedding for every token but added ones, whose ids may be larger.

        Args:
            rows: rows of the embedding.
            where: directory of the tokenizer, for errors.

        Raises:
            CheckpointError: a token has no embedding; the message names it.
        """
        if self.vocab_size > rows:
            found = {index: text for text, index in self._backend.get_vocab(with_added_tokens=False).items()}
            if (highest := max(found, default=-1)) >= rows:
                words = f"tokenizer.json gives {shown(found[highest])} the id {highest}, the model has {rows} tokens"
                raise CheckpointError(f"{where}: {words}; use the tokenizer that the model was made with")

    def try_once(self, where: object) -> None:
        """Try the tokenizer on a short text, and expressions of unknown cost on texts that make bad ones slow.

        Args:
            where: directory of the tokenizer, for errors.

        Raises:
            CheckpointError: the tokenizer fails, takes too long, or lengthens a text too much.
        """
        try:
            self._try_once()
        except RequestError as error:
            raise CheckpointError(f"{where}: {error}; use the tokenizer that the model was made with") from error

    def _try_once(self) -> None:
        if self.vocab_size == 0:
            raise RequestError("the vocabulary of the tokenizer is empty")
        self._cost.check()
        ids = self.encode(WORDS)
        self.decode(ids)
        if not 0 < len(ids) <= MOST_TOKENS:
            raise RequestError(f"the tokenizer makes {len(ids)} tokens of {WORDS!r}, expected 1 to {MOST_TOKENS}")

    def try_templates(self) -> None:
        """Render a short conversation once with each chat template that is used.

        Raises:
            CheckpointError: a template is not valid, or costs too much.
        """
        try_templates(self._templates, {**self._special_tokens, "add_generation_prompt": True})

    def info(self) -> dict[str, Any]:
        """Special tokens by role, size of the vocabulary, and default chat template, which may be None.

        Keys are those of tokenizer_config.json.
        """
        return {
            **self._special_tokens,
            "tokenizer_class": self._kind,
            "additional_special_tokens": sorted(self.token_text(token) for token in self.special_ids),
            "vocab_size": self.vocab_size,
            "chat_template": self._templates.get("default"),
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds the tokens around a prompt, such as BOS."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds {text[error.start : error.end]!r} at character {error.start}, which is not Unicode "
                "text; expected text that UTF-8 can spell"
            ) from error
        self._cost.check_text(text)
        with worded("read the text"):
            if len(text) > LONG_TEXT:  # calls with a batch let other threads run
                ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            else:
                ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @property
    def is_quick(self) -> bool:
        """True if any short text is known to be encoded in a short time; see `tokenizer_trial`."""
        return self._cost.is_known

    def check_tokenisable(self, text: str) -> None:
        """Check that the text of a request does not take too long to tokenise.

        Raises:
            RequestError: the text has more than `MOST_TEXT` bytes, or fewer if the normaliser lengthens it.
        """
        most = self._cost.most_text
        if len(text) * 4 > most and (size := len(text.encode(errors="replace"))) > most:
            raise RequestError(f"the text has {size} bytes, expected at most {most}", advice="send it in parts")

    def check_length(self, text: str, context: int, remedy: str) -> None:
        """Check by its size and its beginning that a text may fit the context, to save seconds of tokenisation.

        Args:
            context: number of tokens that fit.
            remedy: further advice for the error.

        Raises:
            PromptTooLongError: the text cannot fit; the error has a lower bound of its tokens.
        """
        if len(text) <= context:
            return
        tokens = len(text.encode(errors="replace")) // (self._longest * SHRINKS)
        if tokens <= context and len(text) > 2 * BEGINNING * context:
            # Only the last word of the beginning may be tokenised in another way than in the whole text.
            tokens = len(self.encode(text[: BEGINNING * context], add_special_tokens=False)) // 2
        if tokens > context:
            raise PromptTooLongError.of(tokens, context, remedy, at_least=True)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text without special tokens, and the [start, end) of each token in characters.

        Spaces of a token may lie outside of its span, and the span of a token of spaces may be empty, at its end:
        byte-level tokenizers trim spans.
        """
        self._cost.check_text(text)
        with worded("read the text"):
            found = self._backend.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def digest(self) -> str:
        """SHA-256 of all that determines the token ids of a conversation: the tokenizer and its chat templates."""
        stated = [self._backend.to_str(), dict(self._templates), dict(self._special_tokens), list(self.eos_ids)]
        return hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the vocabulary have none."""
        # As in `encode`: calls with a batch let other threads run.
        with worded("spell the ids"):
            texts: list[str] = (
                self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
                if len(ids) > LONG_TEXT
                else [self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)]
            )
        return texts[0]

    def token_id(self, text: str) -> int | None:
        """Id of the token with this spelling; None if there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def named_id(self, name: str) -> int | None:
        """Id of the token with a role in the checkpoint, such as `eos_token` or `fim_pre_token`; None without one."""
        return self.token_id(self._special_tokens[name]) if name in self._special_tokens else None

    def token_text(self, token: int) -> str:
        """Spelling of a token in the vocabulary, such as "▁the"; "<no token 9>" for a padding row of the model."""
        text: str | None = self._backend.id_to_token(token)
        return f"<no token {token}>" if text is None else text

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token within a text, possibly part of a character; b"" for a padding row of the model."""
        spelled: str | None = self._backend.id_to_token(token)
        if spelled is None or token in self.special_ids:
            return (spelled or "").encode()
        if self._byte_level is not None:
            # Added tokens are spelled as plain text, with characters that stand for no byte.
            known = [self._byte_level.get(sign) for sign in spelled]
            return spelled.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace(SPACE_SIGN, " ").encode() if self._space_signs else spelled.encode()

    def vocab(self) -> dict[str, int]:
        """Ids of all tokens by spelling, added tokens included."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def render_marked(self, messages: Sequence[Message], **variables: Any) -> Marked:
        """Render a whole conversation, with its marked generated text; see `apply_chat_template`."""
        known = {**self._special_tokens, "add_generation_prompt": False, **variables}
        return render_marked(self._templates, messages, known)

    @property
    def has_chat_template(self) -> bool:
        """True if the checkpoint has a chat template."""
        return bool(self._templates)

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """Texts of the chat templates."""
        return tuple(self._templates.values())

    @property
    def renders_tools(self) -> bool:
        """True if a chat template renders tools."""
        return any("tools" in text for text in self._templates.values())

    @property
    def tags_tool_calls(self) -> bool:
        """True if a chat template puts tool calls between <tool_call> tags."""
        return any("<tool_call>" in text for text in self._templates.values())

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation to its prompt text, to be encoded with `add_special_tokens=False`.

        Args:
            messages: messages, oldest first, each with at least role and content.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end with the last message's content, without the end of its turn.
            chat_template: another template, as text.
            variables: further variables of the template, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: there is no template, or it refuses the conversation.
        """
        known = {**self._special_tokens, "add_generation_prompt": add_generation_prompt, **variables}
        templates = self._templates if chat_template is None else {"default": chat_template}
        return (render_open if continue_final_message else render)(templates, messages, known)


def _byte_signs() -> dict[str, int]:
    """Byte of each character of a byte-level vocabulary: printable bytes are themselves, others begin at 256.

    Source: GPT-2's `bytes_to_unicode`.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
