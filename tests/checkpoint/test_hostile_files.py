"""Files of strangers that are made to hang, to crash, or to take all memory: each ends in one line, soon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import Pair
from sametoken import LLM, SametokenError, embedded
from sametoken.checkpoint import tokenizer_trial
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.checkpoint.tokenizer_trial import MOST_TEXT, growth, needs_trial, trial
from sametoken.errors import CheckpointError, RequestError
from sametoken.files import json_object
from sametoken.limited import Limited

pytestmark = pytest.mark.usefixtures("one_thread", "alarm")
LONGEST = 60  # seconds for a file, on a busy machine
NO_FILE = "is a pipe, a device or a socket, expected a regular file"


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a test that hangs."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took more than {LONGEST} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def model(tiny_pair: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))


def refusal(call: Callable[[], object]) -> str:
    """The one line that is said of a file."""
    with pytest.raises(SametokenError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def large(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**33)


NAMES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "hf_quant_config.json",
    "modules.json", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [pipe, device, large])
def test_only_regular_files_of_bounded_size_are_read(model: Path, make: Callable[[Path], None], name: str) -> None:
    (model / name).unlink(missing_ok=True)
    if name == "model.safetensors.index.json":
        (model / "model.safetensors").unlink()
    make(model / name)
    words = refusal(lambda: LLM(str(model)))
    if name == "model.safetensors" and make is large:
        assert "truncated or damaged (8589934592 bytes" in words
    else:
        assert (NO_FILE if make is not large else "has 8589934592 bytes, expected at most 134217728") in words
    assert name in words


def test_symbolic_links_to_regular_files_are_read(model: Path, tmp_path: Path) -> None:
    """As the Hub's cache has them."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert LLM(str(linked)).generate([[3, 4]])
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to("config.json")
    assert "Too many levels of symbolic links" in refusal(lambda: LLM(str(linked)))


@pytest.mark.parametrize("name", ["/etc", "../elsewhere", "a/b"])
def test_modules_of_an_embedding_model_lie_in_its_directory(model: Path, name: str) -> None:
    stated = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": name}]
    (model / "modules.json").write_text(json.dumps(stated))
    assert f"names {name!r}, expected a directory beside it" in refusal(lambda: LLM(str(model)))


@pytest.mark.parametrize("name", ["x" * 250 + ".bin", "é" * 200 + ".safetensors", "\ud800.safetensors"])
def test_an_index_with_names_that_no_file_has(model: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "1 of 1 files are missing" in refusal(lambda: LLM(str(model)))


def test_a_file_of_tensors_by_number(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({1: torch.ones(2)}, model / "pytorch_model.bin")
    assert "holds something else than a dictionary of tensors by name" in refusal(lambda: LLM(str(model)))


Change = Callable[[dict[str, Any]], Any]


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replace(old: dict[str, str], content: str, times: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": old, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


UNDEFINED = [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
OFTEN = [{"Sequence": {"id": "A", "type_id": 0}}] * 5000
TEMPLATE = {"type": "TemplateProcessing", "pair": [*OFTEN[:1], {"Sequence": {"id": "B", "type_id": 1}}]}
BAD_TOKENIZERS: dict[str, tuple[Change, str]] = {
    "no table": (
        lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "tokenizer.json: not a tokenizer",
    ),
    "a table that ends early": (
        lambda c: c.update(
            normalizer={"type": "Precompiled", "precompiled_charsmap": "EAAAAAEAAAACAAAAAwAAAAQAAAA="}
        ),
        "the tokenizer fails (index out of bounds",
    ),
    "an undefined token": (
        lambda c: c.update(post_processor={**TEMPLATE, "single": UNDEFINED, "special_tokens": {}}),
        "the tokenizer cannot read the text (no entry found",
    ),
    "a text many times": (
        lambda c: c.update(post_processor={**TEMPLATE, "single": OFTEN, "special_tokens": {}}),
        "tokens of ",
    ),
    "an empty vocabulary": (
        lambda c: (c["model"].update(vocab={}, merges=[], unk_token=None), c.update(added_tokens=[])),
        "the tokenizer makes 0 tokens of",
    ),
    "an unknown token that is none": (lambda c: c["model"].update(unk_token="<none>"), "the tokenizer cannot read"),
    "texts that multiply": (
        lambda c: c.update(normalizer=replace({"String": "a"}, "a" * 16, 12)),
        f"makes up to {16**12} bytes of one, expected at most 256",
    ),
    "signs that multiply": (
        lambda c: c.update(normalizer=replace({"Regex": "."}, "x" * 1000, 4)),
        f"makes up to {1001**4} bytes of one, expected at most 256",
    ),
    "a decoder that multiplies": (
        lambda c: c.update(decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}),
        "makes up to 10000 bytes of one",
    ),
    "an exponential expression": (lambda c: c.update(pre_tokenizer=split("(a+)+$|((a|aa)+)+b")), "on a text of"),
    "a cubic expression": (lambda c: c.update(pre_tokenizer=split("a*a*a*b")), "on a text of"),
    "an exponential decoder": (
        lambda c: c.update(decoder={"type": "Replace", "pattern": {"Regex": "(a|a)+$"}, "content": ""}),
        "the tokenizer's decoder has the expression",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_a_tokenizer_is_tried_once_at_load(model: Path, name: str) -> None:
    change, words = BAD_TOKENIZERS[name]
    content = json_object(model / "tokenizer.json")
    change(content)
    (model / "tokenizer.json").write_text(json.dumps(content))
    begin = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        LLM(str(model))
    assert words in str(caught.value)
    assert time.process_time() - begin < 5  # of this process


def test_a_text_is_tried_before_an_expression_of_unknown_cost_reads_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Limited(tokenizer_trial.__name__, tokenizer_trial.LIMITS._replace(wait=2.0))
    monkeypatch.setattr(tokenizer_trial, "WORK", short)
    tokenizer = strange_tokenizer(model)
    tokenizer.try_once(model)
    for size in (200, 30_000):
        assert len(tokenizer.encode("ab" * (size // 2))) == size
        begin = time.monotonic()
        for read in (tokenizer.encode, tokenizer.encode_spans):
            with pytest.raises(RequestError, match=rf"the tokenizer (takes more than|fails).* of {size} characters"):
                read("z" * size)
        assert time.monotonic() - begin < 20
        assert len(tokenizer.encode("ab")) == 2, "the next text meets a new process"


def strange_tokenizer(model: Path) -> Tokenizer:
    """A tokenizer whose expression takes hours for "zzz...", which the trial at load does not have."""
    content = json_object(model / "tokenizer.json")
    content["pre_tokenizer"] = split("(z?){40}zz*z*y|(z|zz)*y|q")
    (model / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(model)


def test_the_rules_of_published_tokenizers_are_not_tried() -> None:
    content = json_object(Path(str(embedded.target("embedded"))) / "tokenizer.json")
    assert not needs_trial({part: content.get(part) for part in tokenizer_trial.PARTS})
    assert growth(content["normalizer"]) == 12
    assert not needs_trial({"pre_tokenizer": split(next(iter(tokenizer_trial.HARMLESS)))})
    assert needs_trial({"pre_tokenizer": split("a+")})
    assert trial(json.dumps({"pre_tokenizer": split("a+")}), tokenizer_trial.TRIED) is None


def test_texts_are_shorter_where_a_tokenizer_makes_more_of_them(model: Path) -> None:
    content = json_object(model / "tokenizer.json")
    content["normalizer"] = replace({"String": "a"}, "a" * 64, 1)["normalizers"][0]
    (model / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(model)
    tokenizer.check_tokenisable("a" * (MOST_TEXT // 4))
    with pytest.raises(RequestError, match=f"expected at most {MOST_TEXT // 4}"):
        tokenizer.check_tokenisable("a" * (MOST_TEXT // 4 + 1))


TEMPLATES = {
    "two loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "nested ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "an indent": "{{ messages | tojson(indent=10**8) }}",
    "no end": "{% if",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_tried_once_at_load(model: Path, name: str) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    with pytest.raises(CheckpointError, match="the chat template"):
        LLM(str(model))
    assert LLM(str(model), chat_template="{{ messages[0].content }}").chat([{"role": "user", "content": "a"}])


def test_a_template_may_refuse_some_conversations(model: Path) -> None:
    text = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    (model / "chat_template.jinja").write_text(text)
    llm = LLM(str(model))
    with pytest.raises(RequestError, match="no system"):
        llm.chat([{"role": "user", "content": "a"}])


def test_a_bad_tokenizer_from_elsewhere_is_named_alone(tiny_pair: Pair, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(tiny_pair.target, tmp_path / "bad"))
    (bad / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    line = refusal(lambda: LLM(tiny_pair.target, tokenizer=str(bad)))
    assert str(bad) in line
    assert tiny_pair.target not in line
