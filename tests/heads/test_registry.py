"""The registry of drafter kinds: its records, kinds of other distributions, broken ones, and what it must not cost."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sametoken import SpeculativeConfig, kinds
from sametoken.errors import ConfigError
from sametoken.heads.kind import HeadKind, Weighted
from sametoken.heads.registry import build_model_free, head_kind, head_kinds, model_free_drafters, weighted
from sametoken.kinds import Kind
from sametoken.options.speculation import METHODS, MODEL_METHODS

EXITS = "raise SystemExit(3)"
OTHER = """
from sametoken.kinds import Kind
GOOD = Kind(name="other_head", title="other", what="an other head", drafts="other_heads:Drafts", weights="head",
            marks=("other_head",))
TAKEN = Kind(name="medusa", title="other", what="an other head", drafts="other_heads:Drafts")
NO_KIND = "a text"
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with one kind that works and several that do not."""
    (tmp_path / "other_heads.py").write_text(OTHER)
    metadata = tmp_path / "other_heads-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-heads\nVersion: 1.5\n")
    points = {"good": "GOOD", "taken": "TAKEN", "no_kind": "NO_KIND", "absent": "NOTHING"}
    (tmp_path / "other_exits.py").write_text(EXITS)
    lines = [f"{name} = other_heads:{value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text(
        "\n".join([f"[{kinds.GROUP}]", *lines, "gone = no_such_module:KIND", "exits = other_exits:KIND"])
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kinds.kinds.cache_clear()
    yield
    kinds.kinds.cache_clear()
    sys.modules.pop("other_heads", None)


def test_the_records_agree_with_what_they_name() -> None:
    for kind in kinds.kinds():
        if kind.weights is None:
            assert build_model_free(kind.name, SpeculativeConfig()).nodes > 0
            continue
        found = weighted(kind.name)
        assert isinstance(found, HeadKind if kind.weights == "head" else Weighted)
        assert found.kind is kind
    assert len({kind.name for kind in kinds.kinds()}) == len(kinds.kinds())


def test_what_users_may_name_comes_from_the_records() -> None:
    assert (*kinds.choices(), "auto", "none") == METHODS
    assert set(MODEL_METHODS) == {kind.name for kind in kinds.kinds() if kind.weights}
    assert set(model_free_drafters(SpeculativeConfig())) == {"ngram", "suffix", "prediction", "forced"}
    assert kinds.coming_with("prediction") == "prediction"
    with pytest.raises(ConfigError, match="method = 'egale': expected 'draft_target', 'eagle', 'eagle3'"):
        SpeculativeConfig(method="egale")
    with pytest.raises(ConfigError, match=r"unknown method 'meduza'.*medusa"):
        kinds.named("meduza")


def test_one_foreign_name_may_stand_for_several_kinds() -> None:
    assert kinds.aliases("trtllm")["Eagle"] == ("eagle", "eagle3")
    assert kinds.aliases("vllm")["draft_model"] == ("draft_target",)
    assert kinds.aliases("nobody") == {}


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"medusa_num_heads": 3}, True),
        ({"sametoken": {}}, True),
        ({"speculators_model_type": "other"}, True),
        ({"other_head": 1}, False),
        ({"architectures": "no list"}, False),
    ],
)
def test_a_configuration_says_that_it_belongs_to_a_head(config: dict[str, object], head: bool) -> None:
    assert kinds.states_head(config) == head


def test_a_head_says_its_kind() -> None:
    class Config:
        kind, dtype = "medusa", "float32"

    assert head_kind(Config()) is weighted("medusa")
    assert [each.kind.title for each in head_kinds()] == ["EAGLE-1", "EAGLE-3", "Medusa", "MTP"]
    assert kinds.titles() == "EAGLE-1, EAGLE-3 or Medusa"


def test_another_distribution_adds_a_kind(others: None) -> None:
    found = kinds.named("other_head")
    assert (found.source, found.weights) == ("other-heads 1.5", "head")
    assert "other_head" in kinds.choices()
    assert kinds.states_head({"other_head": 1})
    assert kinds.kinds()[: len(kinds.BUILT_IN)] == tuple(kind for kind in kinds.kinds() if kind.source == "sametoken")


def test_a_broken_kind_is_reported_and_left_out(others: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sametoken"):
        names = [kind.name for kind in kinds.kinds()]
    assert names.count("medusa") == 1
    said = {record.message.split("'")[1]: record.message for record in caplog.records}
    assert set(said) == {"taken", "no_kind", "absent", "gone", "exits"}
    assert "SystemExit: 3" in said["exits"]  # a module that ends the process when it is imported
    assert all("of other-heads 1.5 is left out" in message for message in said.values())
    assert "its name 'medusa' is taken by sametoken" in said["taken"]
    assert "it is 'a text', expected a sametoken.kinds.Kind" in said["no_kind"]
    assert "AttributeError" in said["absent"]
    assert "ModuleNotFoundError: No module named 'no_such_module'" in said["gone"]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"name": ["a"]}, "its name is"),
        ({"name": "none"}, "means something else"),
        ({"name": ""}, "its name is"),
        ({"weights": "heads"}, "weights is 'heads'"),
        ({"drafts": ""}, "drafts is ''"),
        ({"words": "ForCausalLM"}, "words is 'ForCausalLM'"),
        ({"marks": ("",)}, "marks is"),
        ({"aliases": None}, "aliases is None"),
        ({"objective": "x:X"}, "aliases['train'] is missing"),
    ],
)
def test_a_record_with_a_wrong_field_is_left_out(record: dict[str, object], problem: str) -> None:
    found = Kind(**{"name": "x", "title": "x", "what": "an x", "drafts": "x:X"} | record)  # type: ignore[arg-type]
    assert problem in str(kinds._problem(found, {}))


def test_a_builder_that_fails_names_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(name="x", title="x", what="an x", drafts="x:X", source="xs 1")
    monkeypatch.setattr("sametoken.heads.registry.named", lambda name: kind)
    for made, words in (
        (lambda config: 1 / 0, "of xs 1 cannot be built"),
        (lambda config: None, "not a drafter: it has no 'taps'"),
    ):
        monkeypatch.setattr(Kind, "load", lambda self, reference, made=made: made)
        with pytest.raises(ConfigError, match=words):
            build_model_free("x", SpeculativeConfig())


def test_a_kind_whose_code_is_broken_says_whose_it_is(others: None) -> None:
    with pytest.raises(ConfigError, match=r"'other_head' of other-heads 1\.5 cannot be loaded.*Drafts.*uninstall"):
        weighted("other_head")


def test_a_broken_kind_of_this_package_is_not_hidden() -> None:
    broken = Kind(name="x", title="x", what="x", drafts="sametoken.kinds:NOTHING")
    with pytest.raises(AttributeError):
        broken.load(broken.drafts)


def test_records_import_no_torch() -> None:
    check = "import sys; from sametoken import kinds; kinds.kinds(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
