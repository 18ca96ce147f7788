"""Thinking told from speech by models' own marks, however the text is cut, after prompts that opened or closed it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import GPT_OSS, OPEN_THINKING, QWEN_3, STOCK
from sametoken.checkpoint.chat import render
from sametoken.server.reasoning import STYLES, Piece, Splitter, count_tokens, find_style

QWEN, R1, OSS = (STYLES[name] for name in ("qwen3", "deepseek_r1", "openai_gptoss"))
HELLO = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
CALLS = (
    "<|channel|>analysis<|message|>look<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
)
CASES = [
    ("qwen3", "<think>\nwell\n\nso\n</think>\n\nHello\n", "well\n\nso", "Hello\n"),
    ("qwen3", "\n<think>a</think>b", "a", "b"),
    ("qwen3", "Hello <think>no</think>", "", "Hello <think>no</think>"),
    ("qwen3", "  plain", "", "  plain"),
    ("qwen3", "<thin", "", "<thin"),
    ("qwen3", "<think>\n", "", ""),
    ("qwen3", "<think>cut off </thin", "cut off </thin", ""),
    ("qwen3", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("qwen3", "", "", ""),
    ("deepseek_r1", "well\n</think>\n\nHello", "well", "Hello"),
    ("deepseek_r1", "<think>well</think>Hello", "well", "Hello"),
    ("deepseek_r1", "cut", "cut", ""),
    ("openai_gptoss", HELLO, "Let me see.", "Hello"),
    ("openai_gptoss", "<|channel|>final<|message|>Hello", "", "Hello"),
    ("openai_gptoss", "<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}"),
    ("openai_gptoss", "<|channel|>analysis<|message|>cut off <|en", "cut off <|en", ""),
    ("openai_gptoss", "no marks", "", "no marks"),
    ("openai_gptoss", CALLS, "look", "I look."),
]


def joined(pieces: list[Piece]) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, text, _ in pieces:
        found[kind] = found.get(kind, "") + text
    return found


@pytest.mark.parametrize(("style", "text", "thought", "said"), CASES)
def test_marks_tell_thought_from_speech(style: str, text: str, thought: str, said: str) -> None:
    found = joined(Splitter(STYLES[style]).feed(text, done=True))
    assert (found.get("reasoning", ""), found.get("content", "")) == (thought, said)


def test_harmonys_calls_have_a_name_and_arguments() -> None:
    found = joined(Splitter(OSS).feed(CALLS, done=True))
    assert (found["call"], found["arguments"]) == ("f", '{"a": 1}')


MARKS = ["<think>", "</think>", "<thi", "nk>", "\n", " ", "a", "<", "<|channel|>", "analysis", "final", "<|message|>"]
MARKS += ["<|end|>", "<|start|>", "assistant", "<|call|>", "commentary to=functions.g", "|>", "é"]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(STYLES)), st.lists(st.sampled_from(MARKS), max_size=14), st.data())
def test_how_a_text_is_cut_changes_nothing(name: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = joined(Splitter(STYLES[name]).feed(text, done=True))
    splitter, pieces, at = Splitter(STYLES[name]), [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        pieces += splitter.feed(text[at : at + size])
        at += size
        shown = joined(pieces)
        assert all(whole.get(kind, "").startswith(said) for kind, said in shown.items() if kind != "call")
    assert joined([*pieces, *splitter.feed("", done=True)]) == whole
    end = 0
    for kind, shown, start in Splitter(STYLES[name]).feed(text, done=True):
        assert kind == "call" or (start >= end and text[start : start + len(shown)] == shown)  # nothing is made up
        end = max(end, start + len(shown))


def test_thinking_that_is_a_part_of_a_mark_is_counted_once() -> None:
    tokens = [b"<|channel|>", b"analysis", b"<|message|>", b"a", b"<|end|>", b"<|start|>", b"assistant"]
    assert count_tokens(Splitter(OSS), [*tokens, b"<|channel|>", b"final", b"<|message|>", b"a"]) == (1, 10)


def test_the_style_is_found_by_the_marks_of_the_template() -> None:
    assert find_style("auto", [QWEN_3]) == find_style("auto", [OPEN_THINKING]) == QWEN
    assert find_style("auto", [GPT_OSS]) == OSS
    for name in STOCK.keys() - {"qwen-3"}:
        assert find_style("auto", [STOCK[name]]) is None
    assert find_style("none", [QWEN_3]) is None
    assert find_style("deepseek-r1", []) == R1


def opened(template: str, reply: str, last: str | None = None, **variables: object) -> dict[str, str]:
    """What a reply means to a prompt that this template makes; `last` is a message that it continues."""
    messages = [{"role": "user", "content": "Is <think> a tag?"}]
    known = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": last is None, **variables}
    prompt = render({"default": template}, messages, known) + (last or "")
    style = find_style("auto", [template])
    assert style is not None
    return joined(style.opening(prompt, last).feed(reply, done=True))


def test_a_prompt_may_have_opened_or_closed_the_thinking() -> None:
    assert opened(OPEN_THINKING, "well</think>Hello") == {"reasoning": "well", "content": "Hello"}
    assert opened(QWEN_3, "<think>well</think>Hello") == {"reasoning": "well", "content": "Hello"}
    assert opened(QWEN_3, "Hello", enable_thinking=False) == {"content": "Hello"}
    assert opened(QWEN_3, "<think>x", enable_thinking=False) == {"content": "<think>x"}
    assert opened(QWEN_3, " on</think>Hello", last="<think>go") == {"reasoning": " on", "content": "Hello"}
    assert opened(QWEN_3, " on", last="<think>go</think>and") == {"content": " on"}
    assert opened(QWEN_3, "<think>", last="plain") == {"content": "<think>"}
    assert opened(GPT_OSS, HELLO) == {"reasoning": "Let me see.", "content": "Hello"}
    assert opened(GPT_OSS, "lo<|return|>", last="<|start|>assistant<|channel|>final<|message|>Hel") == {"content": "lo"}


@pytest.mark.parametrize("size", [1, 3, 7])
def test_tokens_of_the_thinking_are_counted_without_marks(size: int) -> None:
    text = "<think>\nwé ll\n</think>\n\nHello".encode()
    marks = [b"<think>", b"\n", b"w\xc3", b"\xa9 l", b"l", b"\n", b"</think>", b"\n\n", b"Hello"]
    assert count_tokens(Splitter(QWEN), marks) == (3, 8)
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    begin, end = text.index(b"w"), text.index(b"\n</think>")
    thought = sum(begin <= at < end for at in range(0, len(text), size))
    assert count_tokens(Splitter(QWEN), cut) == (thought, text.index(b"H") // size)
