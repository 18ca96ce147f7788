"""Files of models, tokenizers and heads with every kind of wrong content: each loads or ends in one worded line.

Changes are drawn from a seed: a value of another type, an absurd number, NaN, deep nesting, a missing or doubled key,
cut and flipped bytes. SAMETOKEN_FUZZ_CASES sets how many files of each kind are tried.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from cli_checks import Pair, speak
from head_checks import eagle_config, random_weights, shape_of
from sametoken import LLM, SametokenError, SamplingParams
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.write import write_head

CASES = int(os.environ.get("SAMETOKEN_FUZZ_CASES", "20"))
SEED = int(os.environ.get("SAMETOKEN_FUZZ_SEED", "0"))
SECONDS = 2.0  # of processor time for a file
LONGEST = 2100  # characters of an error
FAMILIES = ("llama-3.1", "mistral", "phi-3-long", "qwen-2.5-windows", "qwen-3")
HEADS = ("eagle3", "eagle1", "medusa")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

Mutate = Callable[[bytes, random.Random], bytes]


def deep(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, 1.5, -0.0, 1e-300, 1e300, -1e300, float("nan"), float("inf"), 10**9,
    10**15, -(10**15), 2**31, 2**63, 10**30, 10**400, "", "x", " ", "0", "\ud800", "\0", "../..", "é" * 3000, [], {},
    [[]], [None], {"": None}, {"a": {"b": 1}}, ["x", 1], [10**30], [-1], deep(400, 1), {"x": deep(400, 1)},
)  # fmt: skip


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*here, key)
        yield from paths(inner, (*here, key))


def change(content: Any, chance: random.Random) -> Any:
    """The value with one place changed or removed; places near the root are as likely as those far from it."""
    places = sorted(paths(content), key=lambda path: (len(path), str(path)))
    depth = chance.choice(sorted({len(path) for path in places}))
    place = chance.choice([path for path in places if len(path) == depth])
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    key, old = place[-1], holder[place[-1]]
    kind = chance.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(old, int | float):
        holder[key] = chance.choice((old * 2, old + 1, -old, old * 1000, [old], 1.5))
    elif kind == 2:
        holder[key] = chance.choice(([old], {"a": old}, "text"))
    elif kind == 3 and isinstance(holder, dict):
        holder[chance.choice(list(holder))] = json.loads(json.dumps(old))
    else:
        holder[key] = json.loads(json.dumps(chance.choice(ODD)))  # a copy, which a second change may touch
    return content


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """JSON with one or two changes, or broken as a text."""
    kind = chance.randrange(10)
    if kind == 0:
        return mutate_bytes(data, chance)
    content = json.loads(data)
    for _ in range(chance.choice((1, 1, 2))):
        content = change(content, chance) if content else content
    text = json.dumps(content)
    if kind == 1 and isinstance(content, dict) and content:  # a key twice, the second with an odd value
        key = chance.choice(list(content))
        text = f"{text[:-1]}, {json.dumps(key)}: {json.dumps(chance.choice(ODD))}}}"
    return text.encode()


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """A text that is cut, flipped, re-encoded, or something else altogether."""
    at = chance.randrange(len(data) + 1)
    return chance.choice((
        b"", b"{}", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe" + data, b"\xef\xbb\xbf" + data,
        data[:at], data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :], b"\0" * 100, data + b"}",
        data.decode(errors="replace").encode("utf-16"), b'"text"', b"1" * 10_000,
    ))  # fmt: skip


def mutate_tensors(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file with a changed header, or with changed bytes."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    kind = chance.randrange(8)
    if kind == 0:
        return mutate_bytes(data, chance)
    if kind == 1:
        return chance.choice((0, 1, 2**40, 2**63, 2**64 - 1, size - 1)).to_bytes(8, "little") + data[8:]
    if kind == 2:
        return data[:8] + header + chance.choice((rest[: len(rest) // 2], rest + b"x", b"", b"\xff" * len(rest)))
    changed = mutate_json(header, chance)
    return len(changed).to_bytes(8, "little") + changed + rest


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by family, in two shards each, with everything that a checkpoint may have beside its weights."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_models.save(family, root / family, max_shard_size="150KB")
        speak(root / family)
        config = json.loads((root / family / "config.json").read_text())
        (root / family / "generation_config.json").write_text(
            json.dumps({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 3], "do_sample": True})
        )
        (root / family / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "group_size": 16}})
        )
        (root / family / "config.json").write_text(json.dumps({**config, "partial_rotary_factor": 1.0}))
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def heads(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, target = tmp_path_factory.mktemp("heads"), shape_of(tiny_pair.target)
    made: dict[str, EagleHead | MedusaHeads] = {
        "eagle3": EagleHead(eagle_config(target, draft_vocab_size=50, fc_norm=True), torch.float32),
        "eagle1": EagleHead(eagle_config(target, version=1, size=target.hidden_size), torch.float32),
        "medusa": MedusaHeads(MedusaConfig(2, 1, target.hidden_size, target.vocab_size), torch.float32),
    }
    for name, head in made.items():
        random_weights(head)
        write_head(head, root / name, target, target_name="target")
    return {name: root / name for name in made}


def check(load: Callable[[], object], case: str) -> None:
    start = time.process_time()
    try:
        load()
    except SametokenError as error:
        words = str(error)
        words.encode()  # can be printed
        assert len(words) < LONGEST, case
        assert len(words.splitlines()) == 1, f"{case}: {words}"
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:300]}") from error
    assert time.process_time() - start < SECONDS, case


def try_files(source: Path, file: str, mutate: Mutate, load: Callable[[Path], object], place: Path) -> None:
    """Loads copies of a directory in which one file is another each time."""
    copy = Path(shutil.copytree(source, place / "copy"))
    data = (copy / file).read_bytes()
    failures = []
    for case in range(CASES):
        changed = mutate(data, random.Random(f"{SEED} {source.name} {file} {case}"))
        (copy / file).write_bytes(changed)
        try:
            check(lambda: load(copy), f"{source.name}/{file} seed {SEED} case {case}")
        except AssertionError as error:
            failures.append(f"{error} <- {changed[:200]!r}")
    assert not failures, f"{len(failures)} of {CASES}:\n" + "\n".join(failures[:30])


def speaks(target: str, draft: str | None = None) -> None:
    LLM(target, draft, max_batch_size=2).generate([[5, 6, 7]], SamplingParams(max_tokens=3, seed=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    try_files(models[family], "config.json", mutate_json, lambda place: speaks(str(place)), tmp_path)


SMALL = (
    "generation_config.json", "tokenizer_config.json", "tokenizer.json", "hf_quant_config.json",
    "model.safetensors.index.json",
)  # fmt: skip


@pytest.mark.parametrize("file", SMALL)
def test_files_beside_the_weights(file: str, models: dict[str, Path], tmp_path: Path) -> None:
    try_files(models["llama-3.1"], file, mutate_json, lambda place: speaks(str(place)), tmp_path)


def test_headers_of_weights(models: dict[str, Path], tmp_path: Path) -> None:
    file = sorted(models["llama-3.1"].glob("*.safetensors"))[0].name
    try_files(models["llama-3.1"], file, mutate_tensors, lambda place: speaks(str(place)), tmp_path)


@pytest.mark.parametrize("head", HEADS)
def test_configurations_of_heads(head: str, heads: dict[str, Path], tiny_pair: Pair, tmp_path: Path) -> None:
    target = tiny_pair.target
    try_files(heads[head], "config.json", mutate_json, lambda place: speaks(target, str(place)), tmp_path)


@pytest.mark.parametrize("head", HEADS)
def test_headers_of_heads(head: str, heads: dict[str, Path], tiny_pair: Pair, tmp_path: Path) -> None:
    target = tiny_pair.target
    (weights,) = heads[head].glob("*.safetensors")
    try_files(heads[head], weights.name, mutate_tensors, lambda place: speaks(target, str(place)), tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_a_hundred_thousand_brackets(file: str, models: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(models["llama-3.1"], tmp_path / "copy"))
    (copy / file).write_text("[" * 100_000)
    with pytest.raises(SametokenError, match="is not JSON"):
        speaks(str(copy))


def test_a_chat_template_that_is_not_utf_8(models: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(models["llama-3.1"], tmp_path / "copy"))
    (copy / "chat_template.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(SametokenError, match=r"chat_template\.jinja: .*utf-8"):
        speaks(str(copy))


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "[" * 400 + "]" * 400 + "}", '{"messages": [[[[]]]]}'])
def test_nested_lines_of_prompts(line: str, tiny_pair: Pair, tmp_path: Path, run: Any) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    answer = run("generate", tiny_pair.target, "--prompts", str(tmp_path / "prompts.jsonl"))
    assert answer.code == 2
    assert len(answer.err.strip().splitlines()) == 1
    assert "line 2" in answer.err


def test_a_message_is_short_and_can_be_printed() -> None:
    assert str(SametokenError("x" * 10**6 + "\ud800")).endswith("x\\ud800")
    assert len(str(SametokenError("x" * 10**6))) < LONGEST
