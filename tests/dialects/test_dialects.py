"""Other servers' tables: every key does what its rule says, nothing is passed over, and the published files load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from foreign_keys import markdown

from sametoken.commands.resolution import HINTS
from sametoken.dialects import flags, llama_server, trtllm, vllm
from sametoken.dialects.flags import FLAGS, read_flags
from sametoken.dialects.rules import Group, NoEffect, Only, Rule, Sets, Table, Translation, apply, translate
from sametoken.dialects.trtllm_yaml import read_file, translate_text
from sametoken.dialects.vllm import read_json
from sametoken.errors import ConfigError
from sametoken.options.speculation import SpeculativeConfig

PLAYBOOKS = Path(__file__).parents[1] / "playbooks"
SAMPLES: dict[type, tuple[Any, ...]] = {
    bool: (True, False), int: (7, 8), float: (0.5, 0.25), str: ("thing", "other"), list: ([1],), dict: ({"a": 1},),
}  # fmt: skip
# Values where a rule translates them; all others are passed on as they are.
SPOKEN: dict[Any, tuple[Any, Any]] = {
    trtllm.decoding_type: ("Draft_Target", "draft_target"),
    flags.opposite: (True, False),
    flags.log_level: ("trace", "debug"),
    llama_server.cache_type: ("f16", "auto"),
    llama_server.spec_type: ("draft-simple", "draft_target"),
    llama_server.reasoning: ("deepseek", "auto"),
    llama_server.context: (4096, 4096),
    llama_server.rows: (4, 4),
    llama_server.names: ("one, two", ["one", "two"]),
    vllm.overrides: ('{"rope_theta": 5.0}', {"rope_theta": 5.0}),
    vllm.method: ("ngram_gpu", "ngram"),
    vllm.schedule: ([[1, 4, 4], [5, 8, 2]], {4: 4, 8: 2}),
    None: (3, 3),
}


def rules(table: Table, path: str = "") -> Iterator[tuple[str, Rule]]:
    for key, rule in table.items():
        yield path + key, rule
        if isinstance(rule, Group):
            yield from rules(rule.keys, f"{path}{key}.")


TABLES: dict[str, Table] = {
    "yaml": trtllm.TOP,
    **{f"yaml {name}": table for name, table in trtllm.SPECULATIVE.items()},
    "json": vllm.COMMON,
    **{f"json {name}": table for name, table in vllm.OF_METHODS.items()},
    "flags": {name: flag.rule for name, flag in FLAGS.items()},
}
ALL = [pytest.param(rule, id=f"{name}:{key}") for name, table in TABLES.items() for key, rule in rules(table)]


@pytest.mark.parametrize("rule", ALL)
def test_no_key_is_passed_over(rule: Rule) -> None:
    """Each sets a setting that exists, or is reported with its reason, or refuses with its reason."""
    match rule:
        case Sets(setting, convert, _):
            if isinstance(convert, partial):
                assert convert.func in (llama_server.sampling, llama_server.rope)
                said, ours = 3, {"factor": 1 / 3} if convert.args[0] == "scale" else {convert.args[0]: 3}
            else:
                said, ours = SPOKEN[convert]
            assert setting in HINTS
            assert apply(rule, said, "here").settings == {setting: (ours, "here")}
            assert apply(rule, None, "here") == Translation()
        case NoEffect(kind, reason, usual):
            unusual = [value for value in SAMPLES[kind] if value not in usual]
            assert unusual
            assert apply(rule, unusual[0], "here").notes == [f"here = {unusual[0]!r} has no effect here: {reason}"]
            assert all(apply(rule, value, "here") == Translation() for value in usual)
            with pytest.raises(ConfigError, match=r"here = .*expected"):
                apply(rule, object(), "here")
        case Only(values, reason):
            with pytest.raises(ConfigError) as refusal:
                apply(rule, "thing", "here")
            assert str(refusal.value) == f"here = 'thing': {reason}"
            assert all(apply(rule, value, "here") == Translation() for value in (*values, None))
        case Group(keys, present, absent):
            assert keys
            assert apply(rule, {}, "here").settings == ({present[0]: (present[1], "here")} if present else {})
            for value in ([1], "text", *(() if absent else (None,))):
                with pytest.raises(ConfigError, match="here"):
                    apply(rule, value, "here")


def test_two_spellings_of_a_key_must_agree() -> None:
    both = {"speculative_model": "a", "speculative_model_dir": "a"}
    assert translate(both, trtllm.COMMON, "").settings["draft"].value == "a"
    with pytest.raises(ConfigError, match="speculative_model and speculative_model_dir both set draft"):
        translate({**both, "speculative_model_dir": "b"}, trtllm.COMMON, "")


def test_flags_have_names_of_their_own() -> None:
    names = list(itertools.chain.from_iterable((name, *flag.aliases) for name, flag in FLAGS.items()))
    assert len(set(names)) == len(names)
    assert not set(names) & HINTS.keys()
    switches = [name for flag in FLAGS.values() if flag.kind is bool for name in flag.aliases]
    assert switches
    assert all(name.startswith("-") and not name.startswith("--") for name in switches)  # others would need a "no-"


@pytest.mark.parametrize(
    ("file", "drafts", "rest", "reported"),
    [
        (
            "eagle",
            {"method": ("eagle3", "eagle"), "max_draft_len": 5, "draft": "/opt/gpt-oss-120b-Eagle3/"},
            {"cuda_graphs": True, "kv_cache_free_memory_fraction": 0.9, "kv_cache_enable_block_reuse": False},
            ["disable_overlap_scheduler", "cuda_graph_config.max_batch_size"],
        ),
        (
            "draft_target",
            {"method": "draft_target", "max_draft_len": 4, "draft": "/opt/Llama-3.1-8B-Instruct-FP4/"},
            {"kv_cache_enable_block_reuse": False},
            ["disable_overlap_scheduler"],
        ),
        (
            "two_nodes",
            {"method": ("eagle3", "eagle"), "max_draft_len": 3, "draft": "/opt/Qwen3-235B-A22B-Eagle3/"},
            {"cuda_graphs": True, "kv_cache_free_memory_fraction": 0.9, "kv_cache_enable_block_reuse": False},
            ["disable_overlap_scheduler", "enable_chunked_prefill", "cuda_graph_config.max_batch_size"],
        ),
    ],
)
def test_the_playbooks_files_load(file: str, drafts: dict[str, Any], rest: dict[str, Any], reported: list[str]) -> None:
    said, others = read_file(str(PLAYBOOKS / f"{file}.yml"))
    assert {name: given.value for name, given in said.settings.items()} == drafts
    assert {name: given.value for name, given in others.settings.items()} == rest
    assert said.settings["max_draft_len"].origin == f"{file}.yml: speculative_config.max_draft_len"
    assert said.notes == []
    notes = "\n".join(others.notes)
    assert [key for key in reported if f"{file}.yml: {key} = " in notes] == reported
    assert len(others.notes) == len(reported)


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        ("Eagle", ("eagle3", "eagle")), ("Eagle3", "eagle3"), ("DraftTarget", "draft_target"),
        ("Draft_Target", "draft_target"), ("Medusa", "medusa"), ("NGram", "ngram"), ("SA", "suffix"), ("AUTO", "auto"),
    ],
)  # fmt: skip
def test_decoding_types(stated: str, method: Any) -> None:
    said, _ = translate_text(f"speculative_config: {{decoding_type: {stated}, max_draft_len: 2}}", "f")
    assert said.settings["method"].value == method


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speculative_config: {decoding_type: UserProvided}", "a drafter of your own is a Python object.*expected"),
        (
            "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2, relaxed_topk: 3}",
            "relaxed_topk = 3: .*it would change the output",
        ),
        ("speculative_config: {decoding_type: Egale}", "speculative_config.decoding_type = 'Egale': expected .*Eagle"),
        ("speculative_config: {decoding_type: 3}", "decoding_type = 3: expected .*Eagle"),
        ("speculative_config: {max_draft_len: 3}", "speculative_config has no decoding_type; expected .*Eagle"),
        ("speculative_config:", "speculative_config is empty; expected its keys below it, indented by two spaces"),
        ("kv_cache_config:", "kv_cache_config is empty; expected its keys below it"),
        ("speculative_config: 3", "expected keys and values"),
        ("kv_cache_config: [1]", "kv_cache_config = .*expected keys and values"),
        ("speculative_confg: {}", "unknown key 'speculative_confg': did you mean 'speculative_config'"),
        ("max_batchsize: 3", "f: unknown key 'max_batchsize': did you mean 'max_batch_size'"),
        ("kv_cache_config: {free_memory: 1}", "f: kv_cache_config: unknown key 'free_memory': did you mean"),
        (
            "speculative_config: {decoding_type: NGram, max_draftlen: 3}",
            "speculative_config: unknown key 'max_draftlen': did you mean 'max_draft_len'",
        ),
        (
            "speculative_config: {decoding_type: NGram, medusa_choices: []}",
            "speculative_config.medusa_choices is a key of decoding_type Medusa, not of NGram",
        ),
        (
            "speculative_config: {decoding_type: Eagle3, use_dynamic_tree: true}",
            "use_dynamic_tree is True and dynamic_tree_max_topK None",
        ),
        (
            "speculative_config: {decoding_type: Eagle3, dynamic_tree_max_topK: 4}",
            "use_dynamic_tree is None and dynamic_tree_max_topK 4",
        ),
        ("enable_attention_dp: true", "enable_attention_dp = True: attention is not data-parallel"),
        ("enable_autotuner: maybe", "enable_autotuner = 'maybe': expected true or false"),
        ("max_batch_size: 1\nmax_batch_size: 2", "the key 'max_batch_size' occurs twice, again in line 2"),
        ("kv_cache_config: {dtype: auto, dtype: fp8}", "the key 'dtype' occurs twice"),
        ("pipeline_parallel_size: 2", "pipeline_parallel_size = 2: not supported: no such parallelism"),
        ("- 1", "f is a list, expected keys with values"),
        ("max_batch_size: [", "f is not YAML: "),
        ("? [a]\n: 1", "f is not YAML: "),
        ("1: 2", "unknown key '1'"),
        ("x: !!python/object:os.system 1", "f is not YAML: "),
    ],
)
def test_errors_name_the_key_and_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        translate_text(text, "f")


def test_lost_indentation_is_named_as_such() -> None:
    with pytest.raises(ConfigError) as refusal:
        read_file(str(PLAYBOOKS / "lost_indentation.yml"))
    assert str(refusal.value) == (
        "lost_indentation.yml: speculative_config is empty, and decoding_type, max_draft_len, speculative_model_dir "
        "stand at the top level: the indentation was lost; indent the lines that belong to a group by two spaces"
    )


def test_graphs_can_be_turned_off_and_empty_files_say_nothing() -> None:
    assert translate_text("cuda_graph_config: null", "f")[1].settings["cuda_graphs"].value is False
    assert translate_text("# nothing\n", "f") == (Translation(), Translation())


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yml", "binary", "."):
        with pytest.raises(ConfigError, match="expected a YAML file"):
            read_file(str(tmp_path / name))


def test_vllms_json() -> None:
    said = read_json(
        '{"method": "eagle3", "model": "some/head", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1,'
        ' "num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 9, 1]], "enforce_eager": true}'
    )
    assert {name: given.value for name, given in said.settings.items()} == {
        "method": "eagle3", "draft": "some/head", "max_draft_len": 2, "draft_len_schedule": {4: 2, 9: 1},
        "draft_tensor_parallel_size": 1,
    }  # fmt: skip
    assert said.settings["draft"].origin == "--speculative-config model"
    assert [note.partition(" =")[0] for note in said.notes] == ["--speculative-config enforce_eager"]
    ngram = read_json('{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}')
    chosen = SpeculativeConfig(**{name: given.value for name, given in ngram.settings.items()})
    assert (chosen.method, chosen.max_matching_ngram_size, chosen.min_matching_ngram_size) == ("ngram", 4, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "--speculative-config is not JSON"),
        ("[" * 100_000, "--speculative-config is not JSON"),
        ("[]", "expected an object"),
        ("{}", "expected method, or model"),
        ('{"method": "pard"}', "parallel drafts are not supported; expected one of .*ngram"),
        ('{"method": "egale"}', "expected one of .*ngram"),
        ('{"method": ["ngram"]}', "expected one of .*ngram"),
        ('{"method": "ngram", "num_spec_tokens": 2}', "unknown key 'num_spec_tokens': did you mean 'num_speculative"),
        ('{"method": "eagle3", "prompt_lookup_max": 2}', "prompt_lookup_max is for method ngram"),
        ('{"method": "ngram", "method": "suffix"}', "the key 'method' occurs twice"),
        (
            '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 2], [6, 9, 1]]}',
            "should begin at 5",
        ),
        ('{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4]]}', r"expected \[\[first"),
        ('{"method": "ngram", "rejection_sample_method": "fly"}', "only exact acceptance is supported"),
    ],
)
def test_errors_of_the_json(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_json(text)


def test_flags_are_read_by_their_rules() -> None:
    with pytest.raises(ConfigError, match="not supported: no such parallelism"):
        read_flags({"pp_size": 2})
    assert read_flags({"pp_size": 1, "enforce_eager": True}).settings["cuda_graphs"].value is False
    both = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    assert read_flags(both).settings["kv_cache_dtype"].value == "q8_0"
    with pytest.raises(ConfigError, match="--cache-type-k and --cache-type-v both set kv_cache_dtype"):
        read_flags({**both, "cache_type_v": "bf16"})


def test_the_documentation_holds_the_tables() -> None:
    document = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert markdown() in document, "run python scripts/reference.py docs/server.md"
