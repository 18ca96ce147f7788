"""What is written is read again: equal tensors, equal configuration, equal outputs, for every layout that allows it.

Oracle of what a reader gets: the head that was written.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from head_files import TARGET, VOCAB, eagle_1, eagle_3, layers, medusa, outputs, random_head, read_files
from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.kind import ENGINES, NO_SUCH_DRAFTS
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.read import is_head, read_head, stored_dtype
from sametoken.heads.registry import head_kind
from sametoken.heads.write import write_head
from sametoken.model.rope_config import RopeConfig

ROPES = [
    RopeConfig("default", 10000.0, 4, 48, 48),
    RopeConfig("linear", 500000.0, 4, 48, 48, factor=2.0),
    RopeConfig("llama3", 500000.0, 4, 48, 16, factor=8.0, low_freq_factor=2.0),
    RopeConfig("yarn", 10000.0, 4, 48, 24, factor=2.0, beta_fast=16.0, mscale=0.7, mscale_all_dim=0.4, truncate=False),
    RopeConfig("yarn", 10000.0, 4, 48, 24, factor=2.0, attention_factor=1.5),
    RopeConfig("longrope", 10000.0, 4, 48, 16, factor=3.0, short_factor=(1.0, 1.5), long_factor=(2.0, 3.0)),
]

blocks = st.builds(
    lambda count, window, **changes: layers(count, sliding_windows=window[:count], **changes),
    count=st.sampled_from([1, 2]),
    window=st.sampled_from([(None, None), (5, 5), (5, None), (None, 3)]),
    rope=st.sampled_from(ROPES),
    qkv_bias=st.booleans(),
    out_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
    activation=st.sampled_from(["silu", "gelu"]),
)
flags = st.booleans()
newer = st.builds(
    lambda own_head, draft_vocab_size, **changes: eagle_3(
        own_head=own_head, draft_vocab_size=draft_vocab_size if own_head else VOCAB, **changes
    ),
    layers=blocks,
    taps=st.sampled_from([(1, 3, 4), (7, 0), (2,), (0, 1, 2, 5, 7)]),
    draft_vocab_size=st.sampled_from([1, 12, VOCAB]),
    norm_before_residual=flags,
    norm_before_fc=flags,
    fc_norm=flags,
    norm_output=flags,
    last_norm=flags,
    own_embed=flags,
    own_head=flags,
)
older = st.builds(
    eagle_1, layers=blocks, fc_bias=flags, input_norm=flags, last_norm=flags, own_embed=flags, own_head=flags
)
several = st.builds(
    medusa,
    num_heads=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    own_heads=flags,
    choices=st.sampled_from([(), ((0,), (1,))]),
)
heads = st.one_of(newer, older, several)


def with_bias_of_zeros(head: EagleHead) -> EagleHead:
    """The head with a bias of its fusion that changes nothing."""
    biased = EagleHead(replace(head.config, fc_bias=True), torch.float32)
    biased.load_state_dict({**head.state_dict(), "fc.bias": torch.zeros(biased.fc.bias.shape)})
    return biased


def check_equal(got: Any, expected: Any) -> None:
    assert got.config == expected.config
    ours, theirs = dict(got.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
    assert torch.equal(outputs(got), outputs(expected))
    if isinstance(got.config, EagleConfig):
        assert torch.equal(got.draft_ids, expected.draft_ids)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(config=eagle_1(), layout="sglang")
@example(config=eagle_1(fc_bias=False), layout="sglang")
@given(config=heads, layout=st.sampled_from(sorted(ENGINES)))
def test_what_is_written_is_read_again(
    config: EagleConfig | MedusaConfig, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("head") / "made"
    head = random_head(config)
    if reasons := head_kind(config).refusals(config, layout):
        with pytest.raises(UnsupportedModelError) as caught:
            write_head(head, directory, TARGET, layout=layout, target_name="some/target")
        assert ENGINES[layout] in str(caught.value)
        words = ["has no Medusa drafts"] if reasons == [NO_SUCH_DRAFTS] else reasons
        assert all(word in str(caught.value) for word in words)
        assert not directory.exists()
        return
    write_head(head, directory, TARGET, layout=layout, target_name="some/target")
    assert is_head(directory)
    loaded = read_head(directory, TARGET, torch.float32, "cpu", pack=False)
    if isinstance(config, MedusaConfig) and layout == "vllm":  # whose files have no place for a tree
        head.config = replace(config, choices=())
    elif config.kind == "eagle" and layout == "sglang" and not config.fc_bias:
        head = with_bias_of_zeros(head)  # SGLang reads a bias of every head of EAGLE-1
    check_equal(loaded.module, head)
    assert loaded.notes == ()


def test_our_own_layout_refuses_nothing() -> None:
    for config, own in itertools.product((eagle_3(), eagle_1(), medusa()), ("hf",)):
        assert head_kind(config).refusals(config, own) == []


@pytest.mark.parametrize("layout", ["hf", "vllm", "sglang", "trtllm", "speculators"])
def test_a_plain_head_is_for_everyone(layout: str) -> None:
    for config in (eagle_3(), eagle_3(fc_norm=True, norm_output=True)):
        assert head_kind(config).refusals(config, layout) == []


def test_packed_for_serving_computes_the_same(tmp_path: Path) -> None:
    head = random_head(eagle_3())
    write_head(head, tmp_path / "head", TARGET, target_name="t")
    served = read_head(tmp_path / "head", TARGET, torch.float32, "cpu", pack=True).module
    torch.testing.assert_close(outputs(served), outputs(head))
    with pytest.raises(CheckpointError, match="pack=False"):
        write_head(served, tmp_path / "again", TARGET, target_name="t")


def test_dtype_of_the_file_and_of_the_module(tmp_path: Path) -> None:
    head = random_head(eagle_3())
    write_head(head, tmp_path / "head", TARGET, target_name="t", dtype=torch.bfloat16)
    loaded = read_head(tmp_path / "head", TARGET, torch.float32, "cpu", pack=False)
    assert loaded.config.layers.dtype == "bfloat16"
    expected = dict(head.named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name].bfloat16().float())


def test_unknown_layout_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'sglang'"):
        write_head(random_head(medusa()), tmp_path / "x", TARGET, layout="sglan", target_name="t")


# Directories


def test_a_head_replaces_a_head_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "head"
    write_head(random_head(eagle_3(), 0), place, TARGET, target_name="t")
    write_head(random_head(medusa(), 1), place, TARGET, target_name="t")
    assert sorted(entry.name for entry in place.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    (place / "thesis.txt").write_text("years of work")
    before = (place / "config.json").read_text()
    with pytest.raises(CheckpointError, match=r"thesis\.txt"):
        write_head(random_head(eagle_3(), 0), place, TARGET, target_name="t")
    assert (place / "config.json").read_text() == before
    write_head(random_head(eagle_3(), 0), place, TARGET, target_name="t", force=True)
    assert (place / "thesis.txt").read_text() == "years of work"
    assert sorted(entry.name for entry in place.iterdir()) == ["config.json", "model.safetensors", "thesis.txt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_a_whole_model_is_not_replaced(tmp_path: Path, tiny_llm_dir: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / name).write_bytes((tiny_llm_dir / name).read_bytes())
    assert not is_head(place)
    with pytest.raises(CheckpointError, match="whole model"):
        write_head(random_head(eagle_3()), place, TARGET, target_name="t")


def test_nothing_is_lost_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "head"
    first = random_head(eagle_3(), 0)
    write_head(first, place, TARGET, target_name="t")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("sametoken.checkpoint.write.save_file", "sametoken.checkpoint.write.json.dumps"):
        with monkeypatch.context() as patched:
            patched.setattr(broken, full)
            with pytest.raises(CheckpointError, match="No space left"):
                write_head(random_head(eagle_3(), 1), place, TARGET, target_name="t")
        check_equal(read_head(place, TARGET, torch.float32, "cpu", pack=False).module, first)
    assert sorted(entry.name for entry in place.iterdir()) == ["config.json", "model.safetensors"]


def test_a_changed_configuration_never_stands_beside_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, seen = tmp_path / "head", []
    write_head(random_head(eagle_3(), 0), place, TARGET, target_name="t")
    before = place.stat().st_ino
    replace_file = Path.replace

    def watched(self: Path, to: Path) -> Path:
        seen.append((self.name, sorted(entry.name for entry in place.iterdir() if not entry.name.startswith("."))))
        return replace_file(self, to)

    monkeypatch.setattr(Path, "replace", watched)
    write_head(random_head(eagle_3(), 1), place, TARGET, target_name="t")
    write_head(random_head(medusa(), 1), place, TARGET, target_name="t")
    assert seen == [
        ("model.safetensors", ["config.json", "model.safetensors"]),
        ("config.json", ["config.json", "model.safetensors"]),
        ("medusa_lm_head.safetensors", []),
        ("config.json", ["medusa_lm_head.safetensors"]),
    ]
    assert place.stat().st_ino == before  # it may be a mount or somebody's working directory


def test_the_label_is_the_dtype_of_the_weights(tmp_path: Path) -> None:
    head = random_head(eagle_3(layers=replace(layers(), dtype="bfloat16")))
    write_head(head, tmp_path / "head", TARGET, target_name="t")
    assert read_files(tmp_path / "head")[0]["torch_dtype"] == "float32"
    assert stored_dtype(tmp_path / "head") == torch.float32


def test_tables_reach_as_far_as_the_target(tmp_path: Path) -> None:
    write_head(random_head(eagle_3()), tmp_path / "head", TARGET, target_name="t")
    longer = replace(TARGET, max_position=500)
    loaded = read_head(tmp_path / "head", longer, torch.float32, "cpu", pack=False)
    assert loaded.config.layers.rope.max_position == 48
    cos, _ = loaded.module.rotation(torch.tensor([400]))
    assert torch.allclose(cos[0, 0, :2], torch.tensor([400.0, 4.0]).cos(), atol=1e-4)
