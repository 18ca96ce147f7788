"""The mask of a conversation decodes to what the assistant said, under the templates and tokenizers of every family."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chat_templates
from chat_templates import CLOSING, SIGNS, STOCK
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.errors import DataError, RequestError
from sametoken.train.dataset.masks import (
    USUAL,
    Rules,
    common_prefix,
    common_suffix,
    mask_conversation,
    mask_text,
    spans_of,
)
from speakers import BACKENDS, speaker, turns

WORDS = "The quick fox", "jumps over\nthe dog.", "return a + b", "naïve café 東京 🦊"


def said(tokenizer: Tokenizer, messages: list[dict[str, Any]], rules: Rules = USUAL, cut: bool = False) -> list[str]:
    """The text of every run of masked tokens."""
    tokens, mask, *_ = mask_conversation(tokenizer, messages, rules, cut=cut)
    assert len(tokens) == len(mask)
    return [tokenizer.decode(tokens[a:b], skip_special_tokens=False).strip(" ") for a, b in spans_of(mask)]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("known", [True, False], ids=["end token known", "end token only special"])
@pytest.mark.parametrize("name", STOCK)
def test_masked_text_is_what_the_assistant_said(name: str, known: bool, system: str | None, kind: str) -> None:
    end = CLOSING[name]
    tokenizer = speaker(STOCK[name], kind, (end,) if known or end == "</s>" else ("</s>",))
    messages = turns("Hello", WORDS[1], "And now?", WORDS[3], "Once more", WORDS[1], system=system)
    answers = [WORDS[1], WORDS[3], WORDS[1]]
    if name == "qwen-3":  # which the model would say itself, see the template
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    assert said(tokenizer, messages) == [answer + end for answer in answers]
    assert said(tokenizer, messages, Rules(end_of_turn=False)) == answers
    assert said(tokenizer, messages, cut=True) == [answers[0] + end, answers[1] + end, answers[2]]


@pytest.mark.parametrize("name", STOCK)
def test_tokens_are_those_of_the_whole_text(name: str) -> None:
    tokenizer = speaker(STOCK[name])
    messages = turns("Hello", "Hi", "How?", "So")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert mask_conversation(tokenizer, messages).tokens == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", STOCK)
def test_repeated_and_quoted_answers(name: str) -> None:
    tokenizer = speaker(STOCK[name], ends=(CLOSING[name],))
    messages = turns("Say fox", "fox", "You said fox. fox", "fox fox", "fox", "fox")
    prefix = "<think>\n\n</think>\n\n" if name == "qwen-3" else ""
    assert said(tokenizer, messages, Rules(end_of_turn=False)) == ["fox", "fox fox", prefix + "fox"]


@pytest.mark.parametrize("name", ["chatml", "llama-3.1", "tinyllama", "phi-3"])
@given(st.lists(st.text(st.sampled_from("ab <|>\n:é东user"), max_size=12), min_size=2, max_size=6))
@settings(max_examples=25, deadline=None)
def test_any_content(name: str, contents: list[str]) -> None:
    tokenizer = speaker(STOCK[name], ends=(CLOSING[name],))
    messages = turns(*contents)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if name == "llama-3.1":
        answers = [answer.strip() for answer in answers]
    if not any(answers):
        with pytest.raises(DataError, match="every assistant turn is empty"):
            mask_conversation(tokenizer, messages)
        return
    tokens, mask, *_ = mask_conversation(tokenizer, messages, Rules(end_of_turn=False))
    found = "".join(tokenizer.decode(tokens[a:b], skip_special_tokens=False) for a, b in spans_of(mask))
    # A token may join the end of a header with the start of an answer; nothing of an answer may be missing.
    assert "".join("".join(answers).split()) in "".join(found.split()) or "".join(answers) == found


def test_thinking_of_the_last_turn_counts_and_earlier_thinking_is_gone() -> None:
    tokenizer = speaker(STOCK["qwen-3"], ends=("<|im_end|>",))
    thought = "<think>\nThe fox.\n</think>\n\nthe dog"
    messages = turns("Who?", thought, "Sure?", thought)
    assert said(tokenizer, messages) == ["the dog<|im_end|>", thought + "<|im_end|>"]


def test_the_header_is_the_one_that_the_server_writes() -> None:
    tokenizer = speaker(STOCK["qwen-3"], ends=("<|im_end|>",))
    assert said(tokenizer, turns("Who?", "fox"), Rules(variables={"enable_thinking": False})) == ["fox<|im_end|>"]


def test_tool_calls_count() -> None:
    tokenizer = speaker(STOCK["qwen-3"], ends=("<|im_end|>",))
    call = {"type": "function", "function": {"name": "fox", "arguments": {"dog": 1}}}
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "the dog"},
        {"role": "assistant", "content": "fox"},
    ]
    called = '<tool_call>\n{"name": "fox", "arguments": {"dog": 1}}\n</tool_call><|im_end|>'
    assert said(tokenizer, messages) == [called, "<think>\n\n</think>\n\nfox<|im_end|>"]
    tokenizer = speaker(STOCK["llama-3.1"], ends=("<|eot_id|>",))
    assert said(tokenizer, messages)[0] == '{"name": "fox", "parameters": {"dog": 1}}<|eot_id|>'


def test_generation_blocks_say_the_same() -> None:
    marked = speaker(chat_templates.MARKED_CHATML, ends=("<|im_end|>",))
    messages = turns("Hello", "fox", "And?", "the dog", system="Be brief.")
    for end_of_turn in (True, False):
        believed = mask_conversation(marked, messages, Rules(end_of_turn))
        measured = mask_conversation(speaker(STOCK["chatml"], ends=("<|im_end|>",)), messages, Rules(end_of_turn))
        assert believed == measured


def test_generation_blocks_agree_with_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    backend = BACKENDS["byte level"]()
    backend.add_special_tokens(SIGNS)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    messages = turns("Hello", "fox", "And?", "the dog")
    wanted = theirs.apply_chat_template(
        messages, chat_template=chat_templates.MARKED_CHATML, return_assistant_tokens_mask=True, return_dict=True
    )
    found = mask_conversation(speaker(chat_templates.MARKED_CHATML, ends=("<|im_end|>",)), messages)
    assert found.tokens == list(wanted["input_ids"])
    assert found.mask == [bool(counts) for counts in wanted["assistant_masks"]]


def test_templates_that_show_the_past_otherwise_are_noticed() -> None:
    plain, brief = turns("Hello", "fox", "And?", "dog"), turns("Hello", "fox", "And?", "dog", system="Be brief.")
    mistral = speaker(STOCK["mistral"])
    assert mask_conversation(mistral, plain).as_served
    assert not mask_conversation(mistral, brief).as_served  # the system text is in the prompt and gone afterwards
    assert said(mistral, brief) == ["fox</s>", "dog</s>"]
    opened = speaker(chat_templates.OPEN_THINKING)
    assert not mask_conversation(opened, plain).as_served
    assert said(opened, plain) == ["fox</s>", "dog</s>"]


def test_templates_that_refuse_parts_of_a_conversation() -> None:
    tokenizer = speaker(chat_templates.REFUSES_PREFIXES)
    assert said(tokenizer, turns("Hello", "fox", "And?", "fox")) == ["fox</s>", "fox</s>"]


def test_an_answer_before_any_question_and_two_in_a_row() -> None:
    tokenizer = speaker(STOCK["chatml"], ends=("<|im_end|>",))
    answers = [{"role": "assistant", "content": "fox"}] * 2
    assert said(tokenizer, answers) == ["fox<|im_end|>", "fox<|im_end|>"]


def test_a_message_that_the_template_does_not_show() -> None:
    opened = speaker(chat_templates.OPEN_THINKING.replace("{% else %}", "{% elif message['role'] == 'user' %}"))
    messages = [{"role": "system", "content": "Be brief."}, *turns("Hello", "fox", "And?", "dog")[1:]]
    assert said(opened, messages) == ["fox</s>", "dog</s>"]


def test_a_conversation_that_the_user_ends() -> None:
    tokenizer = speaker(STOCK["llama-3.1"])  # whose end of turn is special here, and no end token
    assert said(tokenizer, turns("Hello", "fox", "And?")) == ["fox<|eot_id|>"]


def test_answers_that_nothing_ends_are_noticed() -> None:
    plain = speaker("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert said(plain, turns("Hello", "fox")) == ["assistant: fox"]  # there is no header in a prompt
    assert not mask_conversation(plain, turns("Hello", "fox")).ended
    assert mask_conversation(plain, turns("Hello", "fox"), cut=True).ended
    assert mask_conversation(plain, turns("Hello", "fox"), Rules(end_of_turn=False)).ended
    assert mask_conversation(speaker(STOCK["chatml"]), turns("Hello", "fox")).ended


def test_text_counts_wholly() -> None:
    tokenizer = speaker(None)
    tokens, mask, *_ = mask_text(tokenizer, "The fox")
    assert tokens == tokenizer.encode("The fox")
    assert all(mask)


@pytest.mark.parametrize(
    ("template", "messages", "error", "reason"),
    [
        (STOCK["chatml"], turns("Hello"), DataError, "there is no assistant turn"),
        (STOCK["chatml"], turns("Hello", ""), DataError, "every assistant turn is empty"),
        ("{{ messages[0].content }}", turns("Hello", "fox"), DataError, "shows none of the 1 assistant turns"),
        (STOCK["mistral"], turns("Hello") * 2, RequestError, "roles must alternate"),
        (None, turns("Hello", "fox"), RequestError, "no chat template"),
        (STOCK["chatml"], [], RequestError, "conversation is empty"),
        (
            "{% if messages[1].content != 'fox' %}{{ raise_exception('not a fox') }}{% endif %}fox",
            turns("Hello", "fox"), DataError, "cannot be found.*not a fox",
        ),
    ],
)  # fmt: skip
def test_refusals(template: str | None, messages: list[dict[str, Any]], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        mask_conversation(speaker(template), messages)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common_ends(a: str, b: str) -> None:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == common_suffix(a[::-1], b[::-1]) == length
