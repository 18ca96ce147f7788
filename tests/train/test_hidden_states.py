"""Hidden states on disk are those of transformers, the oracle; runs that stop go on, and damage is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_prepared import write

import tiny_models
from cli_checks import Pair
from sametoken import embedded
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.errors import ConfigError, DataError
from sametoken.model.decoder import Decoder
from sametoken.train.dataset import extraction
from sametoken.train.dataset.extraction import (
    FeatureReader,
    check_size,
    features,
    parse_bytes,
    parse_part,
    parse_taps,
    run_here,
    spec_of,
    spell,
)
from sametoken.train.dataset.hidden_states import HiddenSpec, decode, encode
from sametoken.train.dataset.preparation import data_digest, prepare
from sametoken.train.dataset.prepared import Origin, Prepared
from speakers import turns

TAPS = (2, 0)


@pytest.mark.parametrize("family", ["llama-2", "mistral", "qwen-3", "phi-3-short"])
@pytest.mark.parametrize("length", [1, 2, 33, 95])
def test_states_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, family: str, length: int
) -> None:
    monkeypatch.setattr(extraction, "PIECE_TOKENS", 33)  # pieces of one token, of two and of many
    model = tiny_models.save(family, tmp_path)
    limit = tiny_models.FAMILIES[family].max_seq_len
    reader = FeatureReader(load_decoder(tmp_path, torch.float32, tiny_models.DEVICE, limit), TAPS, 95)
    tokens = torch.randint(tiny_models.VOCAB, (length,), generator=torch.Generator().manual_seed(length))
    reader(tokens.flip(0))  # what was read before leaves nothing behind
    found = features(reader(tokens))
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
    # states[0] is the embedding, and only the last one is after the final norm
    expected = torch.cat([states[tap + 1][0] if tap < 2 else _before_norm(model, tokens) for tap in TAPS], dim=-1)
    torch.testing.assert_close(found.taps.cpu(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.last.cpu(), states[-1][0], atol=1e-4, rtol=1e-4)


def _before_norm(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        model(tokens[None])
    handle.remove()
    return seen[0]


@pytest.fixture(scope="module")
def decoder(tiny_pair: Pair) -> Decoder:
    return load_decoder(Path(tiny_pair.target), torch.float32, "cpu")


@pytest.fixture
def prepared(tmp_path: Path, tiny_pair: Pair) -> Prepared:
    target = Path(tiny_pair.target)
    tokenizer = load_tokenizer(target)
    data = write(tmp_path / "data", [{"messages": turns(f"Question {i}", "fox " * (i + 1))} for i in range(7)])
    origin = Origin("tiny", model_digest(target), tokenizer.digest(), data_digest([data]), tiny_models.VOCAB)
    return prepare([data], tmp_path / "out", tokenizer, origin)


def spec_for(prepared: Prepared, decoder: Decoder, dtype: str = "bfloat16", taps: tuple[int, ...] = TAPS) -> HiddenSpec:
    """Shards of about two samples."""
    return replace(
        spec_of(prepared, decoder.config.hidden_size, decoder.dtype, taps, dtype),
        shard_bytes=30_000 if dtype == "bfloat16" else 16_000,
    )


def extract(prepared: Prepared, decoder: Decoder, spec: HiddenSpec, *more: Any, **named: Any) -> extraction.Extracted:
    return extraction.extract(prepared, run_here(prepared, decoder, spec.taps), spec, *more, **named)


def files(prepared: Prepared) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((prepared.directory / "hidden").iterdir())}


@pytest.mark.parametrize("taps", [TAPS, ()])
def test_bfloat16_is_what_the_target_said(prepared: Prepared, decoder: Decoder, taps: tuple[int, ...]) -> None:
    spec = spec_for(prepared, decoder, taps=taps)
    extract(prepared, decoder, spec)
    opened = Prepared.open(prepared.directory)
    assert (opened.manifest.taps, opened.manifest.hidden_dtype) == (taps, "bfloat16")
    reader = FeatureReader(decoder, taps, 128)
    for sample in range(len(opened)):
        expected = features(reader(opened[sample].tokens).to(torch.bfloat16))
        found = opened.features(sample)
        assert found is not None
        assert torch.equal(found.taps, expected.taps)
        assert torch.equal(found.last, expected.last)


def test_shards_hold_what_was_planned(prepared: Prepared, decoder: Decoder) -> None:
    for dtype in ("bfloat16", "fp8"):
        spec = spec_for(prepared, decoder, dtype)
        shards = spec.shards(prepared.lengths())
        assert [sample for shard in shards for sample in shard] == list(range(len(prepared)))
        assert len(shards) > 2
        size = check_size(prepared, spec, None)
        extract(prepared, decoder, spec)
        stored = sum(len(content) for name, content in files(prepared).items() if name.endswith(".safetensors"))
        assert size <= stored < size + 400 * len(shards)  # beside the headers
        shutil.rmtree(prepared.directory / "hidden")


def test_fp8_is_close(prepared: Prepared, decoder: Decoder) -> None:
    extract(prepared, decoder, spec_for(prepared, decoder, "fp8"))
    opened, reader = Prepared.open(prepared.directory), FeatureReader(decoder, TAPS, 128)
    for sample in range(len(opened)):
        found, expected = opened.features(sample), features(reader(opened[sample].tokens))
        assert found is not None
        for one, other in zip(found, expected, strict=True):
            assert float((one - other).norm() / other.norm()) < 0.04


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=4, max_size=4))
def test_fp8_bounds(values: list[float]) -> None:
    states = torch.tensor([[values, [0.0] * 4]])
    stored = encode(states, "fp8")
    assert stored["states"].dtype == torch.float8_e4m3fn
    assert stored["scales"].shape == (1, 2)
    error = (decode(stored).float() - states).abs()
    # 3 bits of mantissa, down to the smallest normal number of its scale; then bfloat16
    bound = states.abs() / 14 + states.abs().amax(-1, keepdim=True) * 2.0**-9 / 224
    assert (error <= bound + 1e-37).all()


def test_states_that_are_no_numbers_are_refused(
    prepared: Prepared, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder.norm, "eps", float("nan"))
    with pytest.raises(DataError, match=r"conversation 1: .* NaN or Inf"):
        extract(prepared, decoder, spec_for(prepared, decoder))
    assert list(files(prepared)) == ["manifest.json"]


def test_parts_together_are_the_whole(prepared: Prepared, decoder: Decoder) -> None:
    spec = spec_for(prepared, decoder)
    extract(prepared, decoder, spec)
    whole = files(prepared)
    shutil.rmtree(prepared.directory / "hidden")
    first = extract(prepared, decoder, spec, (0, 2))
    missing = Prepared.open(prepared.directory)
    assert missing.features(0) is not None
    with pytest.raises(DataError, match=r"shard-00001.safetensors is missing: \d of \d shards were not written"):
        missing.features(spec.shards(prepared.lengths())[1].start)
    second = extract(prepared, decoder, spec, (1, 2))
    assert first.written + second.written == first.own + second.own == len(spec.shards(prepared.lengths()))
    assert files(prepared) == whole


def test_a_stopped_run_goes_on(prepared: Prepared, decoder: Decoder) -> None:
    spec = spec_for(prepared, decoder)
    extract(prepared, decoder, spec)
    whole = files(prepared)
    shutil.rmtree(prepared.directory / "hidden")
    read = 0

    def stop(tokens: int) -> None:
        nonlocal read
        read += 1
        if read == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(prepared, decoder, spec, progress=stop)
    assert 1 < len(files(prepared)) < len(whole)
    for number in range(len(spec.shards(prepared.lengths()))):  # what kill -9 leaves behind
        (prepared.directory / "hidden" / f".shard-{number:05d}.safetensors.1.part").touch()
    done = extract(prepared, decoder, spec)
    assert 0 < done.written < done.own
    assert {name: content for name, content in files(prepared).items() if not name.endswith(".part")} == whole
    assert sum(name.endswith(".part") for name in files(prepared)) == done.own - done.written
    assert extract(prepared, decoder, spec).written == 0


def test_hidden_states_of_something_else_are_refused(prepared: Prepared, decoder: Decoder, tmp_path: Path) -> None:
    spec = spec_for(prepared, decoder)
    extract(prepared, decoder, spec)
    before = files(prepared)
    for change in ({"taps": (1, 2)}, {"dtype": "fp8"}, {"target_digest": "1"}, {"tokenizer_digest": "2"}):
        ((name, value),) = change.items()
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        with pytest.raises(DataError, match=rf"hidden/manifest.json: found {name} .*, expected {shown};"):
            extract(prepared, decoder, replace(spec, **change))
    assert files(prepared) == before
    other = tmp_path / "other"
    shutil.copytree(prepared.directory, other)
    manifest = other / "hidden" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(spec.samples_sha256, "3" * 64))
    with pytest.raises(DataError, match=r"hidden states of samples 3333.*, expected"):
        Prepared.open(other)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"found \d+ bytes, expected \d+"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\1"), r"found SHA-256 .*, expected"),
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.with_suffix(".json").write_text("{}"), "not a stamp"),
        (lambda file: file.with_suffix(".json").write_text("{"), "not JSON"),
    ],
)
def test_damaged_shards_are_named(
    prepared: Prepared, decoder: Decoder, damage: Callable[[Path], None], words: str
) -> None:
    extract(prepared, decoder, spec_for(prepared, decoder))
    damage(prepared.directory / "hidden" / "shard-00000.safetensors")
    opened = Prepared.open(prepared.directory)
    assert opened.features(len(opened) - 1) is not None
    with pytest.raises(DataError, match=rf"shard-00000.*{words}"):
        opened.features(0)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 1, "taps": [1]}'])
def test_damaged_manifest(prepared: Prepared, decoder: Decoder, content: str) -> None:
    extract(prepared, decoder, spec_for(prepared, decoder))
    (prepared.directory / "hidden" / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"hidden/manifest\.json"):
        Prepared.open(prepared.directory)


def test_a_budget_is_held_against_the_computed_size(
    prepared: Prepared, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(prepared, decoder)
    size = sum(prepared.lengths()) * (len(TAPS) + 1) * 64 * 2
    assert check_size(prepared, spec, size) == size
    with pytest.raises(DataError, match=rf"need {spell(size)} \({sum(prepared.lengths())} tokens of 384 bytes\)"):
        check_size(prepared, spec, size - 1)
    assert not (prepared.directory / "hidden").exists()
    monkeypatch.setattr(extraction.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 0, 9))
    with pytest.raises(DataError, match=r"has 9 bytes left; make room"):
        check_size(prepared, spec, None)


def test_words_of_the_command_line() -> None:
    assert parse_taps("eagle3", 16) == (1, 7, 12)
    assert parse_taps("eagle1", 4) == parse_taps("medusa", 4) == ()
    assert parse_taps("2, 8,13", 14) == (2, 8, 13)
    for wrong in ("2,2", "14", "-1", "a", "", "1,"):
        with pytest.raises(ConfigError, match="--taps"):
            parse_taps(wrong, 14)
    with pytest.raises(ConfigError, match="at least 7"):
        parse_taps("eagle3", 4)
    assert [parse_bytes(text) for text in ("7", "50GB", "1.5 TiB", "2k")] == [7, 50 * 10**9, 3 << 39, 2000]
    for wrong in ("", "GB", "1XB", "-1GB"):
        with pytest.raises(ConfigError, match="--budget"):
            parse_bytes(wrong)
    assert parse_part("1/4") == (1, 4)
    for wrong in ("4/4", "1", "a/b", "0/0"):
        with pytest.raises(ConfigError, match="--shard"):
            parse_part(wrong)
    assert [spell(size) for size in (999, 1000, 50 * 10**9, 10**16)] == ["999 bytes", "1.0 kB", "50.0 GB", "10000.0 TB"]


def test_the_compiled_kernels_give_the_same_states_as_torch(one_thread: None) -> None:
    """The embedded target runs in one compiled call where there is one; its taps are those of the blocks."""
    tokens = torch.arange(40) * 97 % 4096
    compiled = FeatureReader(load_decoder(embedded.TARGET, torch.bfloat16, "cpu"), (1, 7, 12), 40)(tokens)
    plain = FeatureReader(load_decoder(embedded.TARGET, torch.float32, "cpu"), (1, 7, 12), 40)(tokens)
    assert compiled.shape == (40, 4, 256)
    assert float((compiled - plain).norm() / plain.norm()) < 0.02
