"""Text as it arrives adds up to the text at the end: no half character, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from engine_checks import BYTE, BYTE_VOCAB, WORDS, byte_tokenizer
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.engine.detokenize import INCOMPLETE, Detokenizer
from sametoken.options.sampling import SamplingParams

TOKENIZER = Tokenizer(byte_tokenizer(), {"eos_token": "</s>"}, {})
EMOJI = "👩‍👩‍👧‍👦"
IDS = st.lists(st.integers(0, BYTE_VOCAB - 1), max_size=14)
TEXT = st.text(st.sampled_from("ab é日😀 \u200d"), max_size=12)
PROMPT = [BYTE + ord("x")]
QUICK = settings(max_examples=150, deadline=None)


def spelled(text: str) -> list[int]:
    """A text byte by byte."""
    return [BYTE + byte for byte in text.encode()]


def word(text: str) -> int:
    return BYTE + 256 + WORDS.index(text)


def stream(
    ids: Sequence[int], sizes: Sequence[int], prompt: Sequence[int] = (), **params: Any
) -> tuple[list[str], str]:
    """What is handed out when tokens come in blocks of the given sizes, over and over, and the text at the end."""
    text = Detokenizer(TOKENIZER, prompt, SamplingParams(**params))
    pieces, due = [], 0
    for i, token in enumerate(ids):
        text.push(token)
        if text.find_stop() is not None:
            break
        if sizes and i == due:
            pieces.append(text.delta())
            due += sizes[len(pieces) % len(sizes)]
    text.finish()
    return [*pieces, text.delta()], text.text


BLOCKS = st.lists(st.integers(1, 5), max_size=4)


@QUICK
@example(ids=[BYTE + 0x80, BYTE], prompt=[BYTE + 0xC2], sizes=[1], stops=[])  # completes the prompt's last character
@given(ids=IDS, prompt=IDS, sizes=BLOCKS, stops=st.lists(st.sampled_from(["a", "ab", "cat", " c", "é"]), max_size=2))
def test_any_ids_cut_anyhow_give_one_text(
    ids: list[int], prompt: list[int], sizes: list[int], stops: list[str]
) -> None:
    pieces, text = stream(ids, sizes, prompt, stop=stops)
    assert "".join(pieces) == text
    assert text == stream(ids, [], prompt, stop=stops)[1]
    assert not any(stop in text for stop in stops)


@QUICK
@given(text=TEXT, sizes=BLOCKS)
def test_bytes_become_the_text_they_spell(text: str, sizes: list[int]) -> None:
    pieces, got = stream(spelled(text), sizes, PROMPT)
    assert got == text
    assert "".join(pieces) == text


@pytest.mark.parametrize("prompt", [PROMPT, spelled(EMOJI), [*spelled("日本語"), word("▁the")], []])
def test_characters_of_many_tokens_in_a_row_are_whole(prompt: list[int]) -> None:
    """The window before a token may begin anywhere, so not within one of these."""
    pieces, text = stream(spelled(EMOJI * 4), [1], prompt)
    assert text == "".join(pieces) == EMOJI * 4
    assert [piece for piece in pieces if piece] == list(EMOJI * 4)


@QUICK
@given(text=TEXT, stops=st.lists(TEXT.filter(bool), min_size=1, max_size=3), sizes=BLOCKS, keep=st.booleans())
def test_a_stop_string_cuts_the_text_where_it_is_first_complete(
    text: str, stops: list[str], sizes: list[int], keep: bool
) -> None:
    expected = text
    for end in range(1, len(text) + 1):
        found = [(text[:end].find(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            at, stop = min(found)
            expected = text[: at + len(stop) * keep]
            break
    pieces, got = stream(spelled(text), sizes, PROMPT, stop=stops, include_stop_str_in_output=keep)
    assert got == expected
    assert "".join(pieces) == expected


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    pieces, _ = stream(spelled("1ENx"), [1], PROMPT, stop=["END"])
    assert pieces == ["1", "", "", "ENx", ""]


def test_what_was_held_back_comes_out_at_the_end() -> None:
    assert stream(spelled("1EN"), [1], PROMPT, stop=["END"])[0] == ["1", "", "", "EN"]
    assert stream(spelled("é")[:1], [1], PROMPT)[0] == ["", INCOMPLETE]


def test_words_keep_their_spaces() -> None:
    ids = [word("▁the"), word("▁cat"), word("s"), word("▁the")]
    assert stream(ids, [1], PROMPT)[0] == [" the", " cat", "s", " the", ""]
    # At the beginning of a text the first space belongs to the spelling.
    assert stream(ids, [1], [1])[1] == stream(ids, [1], [])[1] == "the cats the"


def test_special_tokens_are_marks_and_not_text_unless_asked_for() -> None:
    ids = [word("▁the"), 2, word("▁cat")]
    assert stream(ids, [1], PROMPT)[1] == " the cat"
    shown = stream(ids, [1], PROMPT, skip_special_tokens=False)
    assert shown[1] == "".join(shown[0])
    assert "</s>" in shown[1]
