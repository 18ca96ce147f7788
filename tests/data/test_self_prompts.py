"""Users' turns that the model writes: where they begin and end under known templates, and what they depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_templates
from chat_templates import STOCK
from sametoken import LLM, SamplingParams
from sametoken.data.self_prompts import MOST_TURNS, open_turn, plain_text
from sametoken.data.synthesize import HOPELESS, derived_seed
from sametoken.errors import RequestError
from speakers import BACKENDS, speaker, turns

Row = dict[str, Any]
ZEPHYR_IN_WORDS = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}### assistant:\n"
)

# Template: what ends the prompt of a first and of a later turn, and the text that ends a turn.
OPENINGS = {
    "chatml": ("<|im_start|>user\n", "fox<|im_end|>\n<|im_start|>user\n", ""),
    "llama-3.1": (
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        "fox<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        "",
    ),
    "qwen-3": ("<|im_start|>user\n", "fox<|im_end|>\n<|im_start|>user\n", ""),
    "phi-3": ("<|user|>\n", "fox<|end|>\n<|user|>\n", ""),
    "mistral": ("<s>[INST]", " fox</s>[INST]", ""),
    "tinyllama": ("<|user|>\n", "fox</s>\n<|user|>\n", ""),
    "words": ("### user:\n", "### assistant:\nfox\n\n### user:\n", "\n\n### assistant:"),
    "open thinking": ("<s><|User|>", "<|Assistant|>fox</s><|User|>", ""),
}
TEMPLATES = {**STOCK, "words": ZEPHYR_IN_WORDS, "open thinking": chat_templates.OPEN_THINKING}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", OPENINGS)
def test_where_a_users_turn_begins_and_ends(name: str, kind: str) -> None:
    tokenizer = speaker(TEMPLATES[name], kind)
    first, later, stop = OPENINGS[name]
    opened, further = open_turn(tokenizer, []), open_turn(tokenizer, turns("Who?", "fox"))
    assert (opened.stop, further.stop) == (stop, stop)
    assert opened.prompt.endswith(first)
    assert further.prompt.endswith(later)
    for opening, history in ((opened, []), (further, turns("Who?", "fox"))):
        text = tokenizer.apply_chat_template([*history, *turns("The dog")])
        assert text.startswith(opening.prompt)
        assert text[len(opening.prompt) :].lstrip(" ").startswith("The dog" + stop)


@pytest.mark.parametrize("name", ["chatml", "llama-3.1", "mistral"])
def test_the_system_turn_leads(name: str) -> None:
    prompt = open_turn(speaker(STOCK[name]), [{"role": "system", "content": "Be brief."}]).prompt
    assert prompt.count("Be brief.") == 1


def test_the_end_in_words_stops_at_the_special_token_after_it() -> None:
    tokenizer = speaker("{{ bos_token }}{% for m in messages %}{{ '> ' + m.content + ' (over)</s>' }}{% endfor %}<")
    assert open_turn(tokenizer, []) == ("<s>>", " (over)")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}:", "shows a user's text 0 times"),
        ("{{ bos_token }}{% for m in messages %}{{ m.content + m.content + ':' }}{% endfor %}", "text 2 times"),
        ("{% for m in messages %}{{ m.content + ':' }}{% endfor %}", "nothing before a user's text"),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", "nothing after a user's text"),
        ("{{ raise_exception('never') }}", "refuses this conversation: never"),
    ],
)
def test_templates_that_do_not_say_where_a_user_speaks(template: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        open_turn(speaker(template), [])


# --- the command


class Place:
    """An output and the command on it, with the embedded target unless another model is named."""

    def __init__(self, root: Path, run: Any) -> None:
        self.out, self._run = root / "out.jsonl", run

    def __call__(self, *options: str, model: str = "embedded") -> Any:
        common = ("--output", str(self.out), "--threads", "1", "--max_tokens", "16", "--temperature", "0")
        return self._run("synthesize", model, *common, *options)

    def rows(self) -> dict[str, list[Row]]:
        """The conversations by id, every id once."""
        lines = [json.loads(line) for line in self.out.read_text().splitlines()]
        found = {row["conversation_id"]: row["conversations"] for row in lines}
        assert len(found) == len(lines)
        return found


@pytest.fixture
def place(tmp_path: Path, run: Any) -> Place:
    return Place(tmp_path, run)


def test_texts_do_not_depend_on_batch_drafts_or_restarts(place: Place) -> None:
    some = ("--temperature", "0.8", "--seed", "3")
    assert place("--self_prompts", "10", *some, "--num_threads", "1", "--method", "none").code == 0
    whole = place.rows()
    assert sorted(whole) == [f"self-{number:06d}" for number in range(10)]
    place.out.unlink()

    assert place("--self-prompts", "4", *some, "--num_threads", "3").code == 0
    lines = place.out.read_bytes().splitlines(keepends=True)
    place.out.write_bytes(lines[1] + lines[3] + lines[0][:40])  # as a kill leaves it, of other lines
    assert "8 conversations written" in place("--self_prompts", "10", *some, "--draft", "embedded").out
    assert place.rows() == whole
    assert "10 conversations, nothing left" in place("--self_prompts", "10", *some).out
    assert "prompt_top_p = 0.95, now it is 0.5" in place("--self_prompts", "11", *some, "--prompt_top_p", "0.5").err

    users = [turn["content"] for talk in whole.values() for turn in talk if turn["role"] == "user"]
    assert len(set(users)) > 5
    assert all(user and user == user.strip() and "<|" not in user for user in users)
    for talk in whole.values():
        assert [turn["role"] for turn in talk] == ["user", "assistant"] * (len(talk) // 2)
        assert 1 <= len(talk) // 2 <= MOST_TURNS
    assert len({len(talk) for talk in whole.values()}) > 1


def test_users_turns_are_what_the_model_says_after_the_templates_header(place: Place) -> None:
    assert place("--self_prompts", "3", "--turns", "2", "--system_prompt", "Be", "brief.").code == 0
    llm = LLM("embedded")
    for name, talk in place.rows().items():
        text = "<s>"
        for turn, message in enumerate(talk[1:], 2):
            text += f"<|{talk[turn - 2]['role']}|>{talk[turn - 2]['content']}</s>"
            ids = llm.tokenizer.encode(text + f"<|{message['role']}|>", add_special_tokens=False)
            user = message["role"] == "user"
            seed = derived_seed(0, name, turn // 2, "user", 1)
            params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=200, seed=seed)
            (done,) = llm.generate([ids], params if user else SamplingParams(temperature=0.0, max_tokens=16))
            assert message["content"] == (done.text.strip() if user else done.text)
        assert talk[0] == {"role": "system", "content": "Be brief."}
    assert max(len(talk) for talk in place.rows().values()) == 5


def test_a_users_turn_that_is_cut_is_drawn_again_or_ends_the_conversation(place: Place) -> None:
    assert place("--self_prompts", "12", "--turns", "3", "--prompt_max_tokens", "9").code == 0
    llm, lengths = LLM("embedded"), []
    for talk in place.rows().values():
        assert talk[-1]["role"] == "assistant"
        lengths.append(len(talk) // 2)
        for turn in talk[::2]:
            assert len(llm.tokenizer.encode(turn["content"], add_special_tokens=False)) <= 9
    assert len(lengths) == 12
    assert min(lengths) < 3
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=9, seed=derived_seed(0, name, 1, "user", 1))
        for name in place.rows()
    ]
    first = llm.generate([llm.tokenizer.encode("<s><|user|>", add_special_tokens=False)] * 12, params)
    assert {done.finish_reason for done in first} == {"stop", "length"}  # some were drawn again


def test_turns_that_never_end_end_the_run(place: Place) -> None:
    done = place("--self_prompts", "99", "--prompt_max_tokens", "1")
    assert done.code == 2
    assert f"{HOPELESS} conversations in a row got no answer" in done.err
    assert "8 attempts at a user's turn were empty or longer than 1 tokens; raise --prompt-max-tokens" in done.err


@pytest.mark.thorough
def test_held_out_conversations_begin_with_nothing_that_was_said_before(place: Place, tmp_path: Path) -> None:
    """Other seeds alone do not keep two sets apart: what a narrow model asks repeats."""
    some = ("--self-prompts", "150", "--turns", "1", "--prompt-temperature", "0.7")
    assert place(*some).code == 0
    trained = place.out.rename(tmp_path / "trained.jsonl")
    said = {
        plain_text(talk[0]["content"])
        for talk in (json.loads(x)["conversations"] for x in trained.read_text().splitlines())
    }
    held_out = ("--self-prompts", "40", *some[2:], "--seed", "1")

    def first_turns() -> list[str]:
        return [plain_text(talk[0]["content"]) for _, talk in sorted(place.rows().items())]

    assert place(*held_out).code == 0
    with_overlap = first_turns()
    assert said & set(with_overlap)
    place.out.unlink()
    place.out.with_name("out.jsonl.run.json").unlink()
    assert place(*held_out, "--exclude", str(trained)).code == 0
    assert not said & set(first_turns())
    kept = [(a, b) for a, b in zip(with_overlap, first_turns(), strict=True) if a not in said]
    assert all(a == b for a, b in kept)  # only what was excluded is drawn again
    trained.write_text(trained.read_text() + "\n")
    assert "exclude = " in place(*held_out, "--exclude", str(trained)).err


@pytest.mark.parametrize(
    ("one", "other"), [("Hi there!", "hi  there"), ("I'd like it.", "i'd like it"), ("?!", " ?! "), ("Café?", "CAFÉ")]
)
def test_the_same_words_are_the_same_turn(one: str, other: str) -> None:
    assert plain_text(one) == plain_text(other)
    assert plain_text(one) != plain_text(one + " too")


def speaking(pair: Any, directory: Path, template: str) -> str:
    """The tiny target, whose tokens are letters, with another template."""
    directory.mkdir()
    for file in Path(pair.target).iterdir():
        if file.name != "chat_template.jinja":
            (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(template)
    return str(directory)


def test_an_end_in_words_ends_a_users_turn(place: Place, pair: Any, tmp_path: Path) -> None:
    model = speaking(pair, tmp_path / "model", "{% for m in messages %}{{ '/' + m.content + 'e' }}{% endfor %}")
    assert place("--self_prompts", "12", "--turns", "1", "--prompt_max_tokens", "100", model=model).code == 0
    asked = [talk[0]["content"] for talk in place.rows().values()]
    assert sum(map(len, asked)) > 100
    assert "e" not in "".join(asked)


def test_a_template_without_a_place_for_the_user_is_said_at_once(place: Place, pair: Any, tmp_path: Path) -> None:
    mute = speaking(pair, tmp_path / "mute", "{% for m in messages %}{{ m.role }}: {% endfor %}")
    done = place("--self_prompts", "2", model=mute)
    assert done.code == 2
    assert "shows a user's text 0 times, expected once" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--self_prompts", "2", "--data", "x"), "got --data and --self-prompts"),
        (("--self_prompts", "2", "--limit", "1"), "--limit is for --data"),
        (("--self_prompts", "2", "--no-chat"), "leave out --no-chat"),
        (("--self_prompts", "0"), "--self-prompts 0: expected at least 1"),
        (("--self_prompts", "2", "--turns", "0"), "--turns 0: expected at least 1"),
        (("--self_prompts", "2", "--prompt_max_tokens", "0"), "--prompt-max-tokens 0"),
        (("--self_prompts", "2", "--prompt_temperature", "nan"), "--prompt-temperature nan"),
        (("--self_prompts", "2", "--prompt_top_p", "1.5"), "--prompt-top-p 1.5"),
        (("--self_prompts", "2", "--exclude", "absent.jsonl"), "--exclude absent.jsonl is no file"),
        (("--self_prompts", "2", "--exclude", "{out}"), "is the output"),
        (("--data", "x", "--exclude", "y"), "--exclude is for conversations without data"),
        (("--data", "x", "--turns", "2"), "--turns is for conversations without data: give --self-prompts"),
        ((), "or --self-prompts COUNT to do without"),
    ],
)
def test_what_has_no_meaning_is_refused(place: Place, options: tuple[str, ...], words: str) -> None:
    done = place(*(option.format(out=place.out) for option in options))
    assert done.code == 2
    assert words in done.err
    assert not place.out.exists()


def test_a_server_cannot_write_users_turns(place: Place) -> None:
    done = place._run("synthesize", "--self_prompts", "2", "--url", "http://127.0.0.1:9", "--output", str(place.out))
    assert done.code == 2
    assert "no place for a user's turn that is begun and not finished; leave out --url" in done.err
