"""Tokenizers and chat templates give what `transformers.AutoTokenizer`, the oracle, gives on the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from sametoken.checkpoint.shared_vocabulary import check_same_tokenizer, same_files
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    DraftMismatchError,
    PromptTooLongError,
    RequestError,
)
from speakers import BACKENDS, SPECIAL, byte_fallback, byte_level

TEXTS = [
    "", " ", "The dog", " the  quick\tfox\n\n  jumps ", "return a + b", "<s>The</s> dog<|user|>fox", "<|user|> \n the",
    "naïve café 東京", "🦊 emoji \u200b and \x00 bytes", "12345 + 678", "don't DON'T", "a" * 300, "</s></s>", "é\u0301",
]  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role not in ['system', 'user', 'assistant'] %}\n"
    "        {{ raise_exception('unknown role ' + message.role) }}\n"
    "    {% endif %}\n"
    "    {%- generation %}<|{{ message['role'] }}|>{{ message['content'] | trim + eos_token }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking is defined %}{{ thinking }}{% endif %}{% endif %}"
)


def save(directory: Path, backend: Backend, settings: dict[str, Any], model_type: str = "llama") -> Path:
    """A checkpoint directory without weights."""
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def added_tokens(backend: Backend) -> dict[str, Any]:
    keep = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        str(index): {key: getattr(token, key) for key in keep}
        for index, token in backend.get_added_tokens_decoder().items()
    }


def oracle(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def compare(directory: Path) -> Tokenizer:
    """Load with ours and with transformers, and hold every result against the other."""
    ours, theirs = load_tokenizer(directory), oracle(directory)
    assert ours.vocab() == theirs.get_vocab()
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for index in range(ours.vocab_size):
        assert ours.token_text(index) == theirs.convert_ids_to_tokens(index)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids[0] == theirs.eos_token_id
    assert set(theirs.all_special_ids) <= ours.special_ids
    return ours


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("settings", "model_type"),
    [
        (PLAIN, "llama"),
        (PLAIN | {"add_bos_token": False, "clean_up_tokenization_spaces": True}, "llama"),
        (PLAIN | {"pad_token": "<pad>", "additional_special_tokens": ["<|user|>", "<|end|>"]}, "llama"),
        (PLAIN | {"image_token": "<image>"}, "llama"),
        ({"tokenizer_class": "LlamaTokenizer", "legacy": False}, "llama"),
        ({"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}, "llama"),
        ({"tokenizer_class": "LlamaTokenizerFast"}, "phi3"),
        ({"tokenizer_class": "LlamaTokenizer"}, "mistral"),
        (PLAIN, "qwen2"),
        ({"tokenizer_class": "Qwen2Tokenizer"}, "qwen3"),
        ({}, "llama"),
    ],
)
def test_same_results_as_transformers(tmp_path: Path, kind: str, settings: dict[str, Any], model_type: str) -> None:
    compare(save(tmp_path, BACKENDS[kind](), settings, model_type))


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("change", [{}, {"special": False}, {"lstrip": True, "rstrip": True}])
def test_added_tokens_that_the_settings_repeat_or_change(tmp_path: Path, kind: str, change: dict[str, Any]) -> None:
    backend = BACKENDS[kind]()
    stated = added_tokens(backend)
    stated[str(backend.token_to_id("<|user|>"))] |= change
    compare(save(tmp_path, backend, PLAIN | {"added_tokens_decoder": stated}))


def test_older_files_beside_the_settings(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), PLAIN)
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<|pad|>", "eos_token": "<|user|>"}')
    (tmp_path / "added_tokens.json").write_text("{}")
    assert compare(tmp_path).eos_ids == (byte_level().token_to_id("<|user|>"),)


def test_what_transformers_saved_itself(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_fallback(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    messages = [{"role": "user", "content": "The fox"}]
    assert compare(tmp_path).apply_chat_template(messages) == oracle(tmp_path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_vocabulary_files_without_tokenizer_json(tmp_path: Path) -> None:
    """GPT-2's own layout, which only transformers reads."""
    state = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    compare(tmp_path)


def test_plain_files_are_read_without_transformers(tmp_path: Path) -> None:
    """`import transformers` costs more than a second of start-up; the embedded model must not pay it."""
    save(tmp_path, byte_fallback(), PLAIN)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    code = (
        "import sys, pathlib; from sametoken.checkpoint.tokenizer_files import load_tokenizer\n"
        "t = load_tokenizer(pathlib.Path(sys.argv[1])); t.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "assert not {'transformers', 'huggingface_hub', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_without_transformers_a_family_that_needs_it_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, byte_level(), {**PLAIN, "tokenizer_class": "GPT2Tokenizer"})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed; run: pip install 'sametoken\[transformers\]'"):
        load_tokenizer(tmp_path)


def test_end_tokens_come_from_three_files(tmp_path: Path) -> None:
    save(tmp_path, byte_fallback(), PLAIN)
    assert load_tokenizer(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    assert load_tokenizer(tmp_path).eos_ids == (2, 9, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match="eos_token_id is '</s>'"):
        load_tokenizer(tmp_path)


def test_facts_of_a_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), PLAIN))
    ids = {name: byte_level().token_to_id(name) for name in [*SPECIAL, "<tool>"]}
    assert tokenizer.special_ids == {ids[name] for name in SPECIAL}
    assert tokenizer.vocab_size == ids["<tool>"] + 1 == len(tokenizer.vocab())
    assert tokenizer.token_text(ids["<tool>"]) == "<tool>"
    assert tokenizer.token_text(tokenizer.vocab_size) == f"<no token {tokenizer.vocab_size}>"
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}', '{"added_tokens": [], "model": {"type": "BPE"}}'])
def test_damaged_tokenizer_file(tmp_path: Path, content: str) -> None:
    save(tmp_path, byte_fallback(), PLAIN)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json or tokenizer\.model"):
        load_tokenizer(tmp_path)


# Chat templates

CONVERSATION = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Où est <le> chat?"},
    {"role": "assistant", "content": "  there", "tool_calls": None},
    {"role": "user", "content": "thanks"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"é": "<b>"}}}]
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools:" + TEMPLATE}]


@pytest.mark.parametrize("form", ["file", "setting", "list", "list and files"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])  # read by ourselves, and through transformers
@pytest.mark.parametrize(
    "variables", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"thinking": "no"}], ids=str
)
def test_same_prompt_as_transformers(tmp_path: Path, form: str, model_type: str, variables: dict[str, Any]) -> None:
    stated = {"setting": TEMPLATE, "list": NAMED, "list and files": NAMED}.get(form)
    save(tmp_path, byte_fallback(), PLAIN | ({"chat_template": stated} if stated else {}), model_type)
    if "file" in form:
        (tmp_path / "chat_template.jinja").write_text("file:" + TEMPLATE)
    if form == "list and files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool file:" + TEMPLATE)
    expected = oracle(tmp_path).apply_chat_template(
        CONVERSATION, tokenize=False, **{"add_generation_prompt": True, **variables}
    )
    assert load_tokenizer(tmp_path).apply_chat_template(CONVERSATION, **variables) == expected


def talk(directory: Path, template: object, messages: Any) -> str:
    save(directory, byte_fallback(), PLAIN | ({"chat_template": template} if template else {}))
    return load_tokenizer(directory).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, CONVERSATION, "no chat template"),
        (TEMPLATE, [], "conversation is empty"),
        (TEMPLATE, ["hello", {"content": "x"}], "expected an object with role and content"),
        (TEMPLATE, [{"role": "pirate", "content": "x"}], "unknown role pirate"),
        ("{{ messages[0].content + 1 }}", CONVERSATION, "chat template cannot read"),
        ("{{ ''.__class__.__mro__ }}", CONVERSATION, "unsafe"),
        ([{"name": "rag", "template": "x"}], CONVERSATION, "chat templates rag and none named default"),
    ],
)
def test_conversations_that_cannot_be_put(tmp_path: Path, template: object, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        talk(tmp_path, template, messages)


@pytest.mark.parametrize(
    ("template", "words"), [("{% if %}", "not valid: line 1"), (7, "is a int"), (["x"], "is a list")]
)
def test_templates_that_are_none(tmp_path: Path, template: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        talk(tmp_path, template, CONVERSATION)


# Drafts


def pair(tmp_path: Path, change: Any, settings: dict[str, Any] | None = None) -> tuple[Tokenizer, Tokenizer]:
    state = json.loads(byte_fallback().to_str())
    target = save(tmp_path / "target", Backend.from_str(json.dumps(state)), PLAIN)
    change(state)
    draft = save(tmp_path / "draft", Backend.from_str(json.dumps(state)), PLAIN | (settings or {}))
    return load_tokenizer(target), load_tokenizer(draft)


def swap(state: dict[str, Any]) -> None:
    vocab = state["model"]["vocab"]
    vocab["<0x05>"], vocab["<0x04>"] = vocab["<0x04>"], vocab["<0x05>"]


def test_same_vocabulary_is_accepted(tmp_path: Path) -> None:
    check_same_tokenizer(*pair(tmp_path, lambda state: None))


@pytest.mark.parametrize(
    ("change", "settings", "equal"),
    [
        (lambda state: None, {}, True),
        (lambda state: None, {"chat_template": "{{ messages }}"}, True),
        (lambda state: None, {"bos_token": "<unk>"}, False),
        (swap, {}, False),
    ],
)
def test_a_tokenizer_in_equal_files_is_not_read_again(
    tmp_path: Path, change: Any, settings: dict[str, Any], equal: bool
) -> None:
    pair(tmp_path, change, settings)
    assert same_files(tmp_path / "target", tmp_path / "draft") is equal


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("added_tokens.json", '{"<new>": 9}'),
        ("generation_config.json", '{"eos_token_id": 9}'),
        ("config.json", '{"model_type": "llama", "text_config": {"eos_token_id": 9}}'),
        ("tokenizer.model", "another one"),
    ],
)
def test_further_files_of_a_tokenizer_count(tmp_path: Path, name: str, text: str) -> None:
    pair(tmp_path, lambda state: None)
    (tmp_path / "draft" / name).write_text(text)
    assert not same_files(tmp_path / "target", tmp_path / "draft")


def test_draft_that_shares_one_of_several_end_tokens_is_accepted(tmp_path: Path) -> None:
    target, _ = pair(tmp_path, lambda state: None)
    (tmp_path / "draft" / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    check_same_tokenizer(target, load_tokenizer(tmp_path / "draft"))


def longer(state: dict[str, Any]) -> None:
    state["added_tokens"].append({**state["added_tokens"][0], "id": len(state["model"]["vocab"]), "content": "<new>"})


def ordinary(state: dict[str, Any]) -> None:
    state["added_tokens"][-1]["special"] = False


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (swap, {}, r"token 7 is '<0x04>' in the target and '<0x05>' in the draft"),
        (longer, {}, r"is '<no token \d+>' in the target and '<new>' in the draft \(target (\d+) tokens, draft \d+\)"),
        (ordinary, {}, r"\('<\|user\|>'\) is special only in the target"),
        (lambda state: None, {"bos_token": "<unk>"}, "BOS is 1 in the target and 0 in the draft"),
        (lambda state: None, {"eos_token": "<unk>"}, r"EOS is \[2\] in the target and \[0\] in the draft"),
    ],
)
def test_draft_with_another_vocabulary_is_refused_at_the_first_difference(
    tmp_path: Path, change: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DraftMismatchError, match=words):
        check_same_tokenizer(*pair(tmp_path, change, settings))


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_text_far_beyond_the_context_is_refused_by_its_beginning(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = BACKENDS[name]()
    backend.add_tokens(["x" * 4_000])  # by its bytes alone, any text below may be short
    tokenizer = load_tokenizer(save(tmp_path, backend, {}))
    assert tokenizer is not None
    seen, encode = list[int](), tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: seen.append(len(text)) or encode(text, **options))
    text = "The dog jumps. " * 20_000
    with pytest.raises(PromptTooLongError, match=r"at least \d+ tokens") as caught:
        tokenizer.check_length(text, 100, "send less")
    assert caught.value.tokens <= len(encode(text))
    assert sum(seen) < 0.01 * len(text)
    tokenizer.check_length(" " * 2_500, 2_000, "send less")  # may fit, so that nothing is tokenised yet
    assert len(seen) == 1
