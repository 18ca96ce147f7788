"""Whole command lines of llama-server and `vllm serve`: no option of theirs is unknown."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from cli_checks import call
from sametoken.checkpoint.chat import read_template
from sametoken.commands import serve
from sametoken.commands.doors import Door
from sametoken.commands.options import variants
from sametoken.dialects.llama_door import llama_server
from sametoken.dialects.peers import OURS as JOINED
from sametoken.dialects.peers import PeerOption, table
from sametoken.dialects.vllm_door import vllm
from sametoken.errors import ConfigError

DOORS = {"llama_server": llama_server, "vllm": vllm}
ROWS = [(peer, row) for peer in DOORS for row in table(peer) if row.names[0].startswith("-")]
# A value that each rule takes; "1" for the others.
VALUES = {
    "template": "{}", "sampling": "{}", "origins": '["*"]', "key_file": "/dev/null", "samplers": "top_k;temperature",
    "dtype": "half", "thinking": "on", "budget": "-1", "effort": "low", "device": "none",
    "marks": "{}", "overrides": "{}",
}  # fmt: skip
OURS = {spelling for option in serve.OPTIONS for each in option.spellings for spelling in each.split("/")} | {
    f"--{each}" for each in variants(serve.OPTIONS)
}


@pytest.mark.parametrize(("peer", "row"), ROWS, ids=[f"{peer}{row.names[0]}" for peer, row in ROWS])
def test_an_option_is_taken_or_refused_with_advice(peer: str, row: PeerOption) -> None:
    value = VALUES.get(row.what.partition(":")[0], "1")
    assert row.kind in ("set", "none", "refused")
    for name in row.names:
        words = [name, value] if row.value else [name]
        try:
            passage = DOORS[peer](words, {})
        except ConfigError as error:
            said = str(error)
            passage = None
        if passage is None:
            assert name in said
            assert len(said.split()) > 4
            continue
        unknown = [word for word in passage.words if word.startswith("--") and word.partition("=")[0] not in OURS]
        assert unknown in ([], ["--model"])


def test_what_llama_server_means() -> None:
    said = [
        "-m",
        "x.gguf",
        "-c",
        "512",
        "-np",
        "2",
        "--alias",
        "b,a",
        "--api-key",
        "k,l",
        "--temp",
        "0.5",
        "-s",
        "-1",
        "-fa",
        "off",
        "--kv-cache-max-tokens",
        "9",
        "--host",
        "::1,/run/a.sock",
    ]
    passage = llama_server(said, {"LLAMA_ARG_PORT": "99", "LLAMA_ARG_TOP_K": "7", "LLAMA_ARG_TEMPERATURE": "2"})
    words = " ".join(passage.words)
    for part in ("--any-model", "--ctx-size 256", "--served-model-name b", "--served-model-name a",
                 "--api-key k", "--api-key l", "--port 99", "--kv-cache-max-tokens 9", "--parallel 2",
                 "--cors-origin *", "--host ::1,/run/a.sock"):  # fmt: skip
        assert part in words
    sampling = json.loads(passage.words[passage.words.index("--default-sampling") + 1])
    assert sampling == {"temperature": 0.5, "top_k": 7, "top_p": 0.95, "min_p": 0.05}
    assert passage.idle == ["-fa off"]
    assert "--port 8080" in " ".join(llama_server([], {}).words)


def test_marks_of_reasoning_are_taken_where_they_are_those_that_are_found() -> None:
    stated = {"reasoning_parser": "qwen3", "reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    words = vllm(["m", "--reasoning-config", json.dumps(stated)], {}).words
    assert words[words.index("--reasoning-parser") + 1] == "qwen3"
    with pytest.raises(ConfigError, match=r"reasoning_end_str '</t>'.*leave it out"):
        vllm(["m", "--reasoning-config", '{"reasoning_end_str": "</t>"}'], {})


def test_what_vllm_means() -> None:
    said = ["m", "--max-model-len", "4k", "--seed", "0", "--served-model-name", "a", "b", "--dtype", "half"]
    passage = vllm([*said, "--override-generation-config", '{"top_k": 3}', "--compilation-config.mode", "3"], {})
    words = " ".join(passage.words)
    for part in ("m ", "--max-model-len 4000", "--served-model-name a --served-model-name b", '{"top_k": 3}'):
        assert part in words
    assert passage.idle[0] == "--seed 0"
    assert any("compilation" in each for each in passage.idle)
    assert "--no-enable-request-id-headers" in passage.words
    assert "--no-enable-request-id-headers" not in vllm(["m", "--enable-request-id-headers"], {}).words
    assert "--no-enable-request-id-headers" in vllm(["m", "--disable-request-id-headers"], {}).words


@pytest.mark.parametrize("words", [["-ag"], ["--lora", "x"], ["-c", "much"], ["--temp", "warm"], ["--port"]])
def test_refusals_of_llama_server(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        llama_server(words, {})


@pytest.mark.parametrize("words", [["-np", "0"], ["-np", "-5"]])
def test_llama_server_refuses_no_requests_at_a_time(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"-np (0|-5): expected a number of requests at a time"):
        llama_server(words, {})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LLAMA_ARG_CTX_SIZE", "abc", "LLAMA_ARG_CTX_SIZE abc: expected a whole number"),
        ("LLAMA_ARG_N_PARALLEL", "-5", "LLAMA_ARG_N_PARALLEL -5: expected a number of requests"),
        ("LLAMA_ARG_KV_UNIFIED", "perhaps", "LLAMA_ARG_KV_UNIFIED=perhaps: expected one of 1, true,"),
    ],
)
def test_a_wrong_value_of_a_variable_is_refused_by_its_name(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        llama_server([], {name: value})


@pytest.mark.parametrize("page", ["from-llama-server", "from-vllm"])
def test_commands_of_the_pages(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    commands = [
        shlex.split(each) for each in re.findall(r"`(sametoken (?:llama-server|vllm serve) [^`]*-[^`]+)`", text)
    ]
    assert len(commands) >= 4
    for _, door, *words in commands:
        passage = llama_server(words, {}) if door == "llama-server" else vllm(words[1:], {})
        assert passage.words


@pytest.mark.parametrize(("value", "thinks"), [(None, True), ("auto", True), ("on", True), ("off", False)])
def test_llama_server_tells_templates_whether_to_think(value: str | None, thinks: bool) -> None:
    assert llama_server([] if value is None else ["--reasoning", value], {}).template == {"enable_thinking": thinks}


def test_templates_by_name() -> None:
    assert "<|im_start|>" in read_template("chatml")
    assert read_template("This is not a template, it is a text") == "This is not a template, it is a text"


@pytest.mark.parametrize(
    ("words", "means", "idle"),
    [
        ("-t -1", "", ""),
        ("-t 3", "--threads 3", ""),
        ("-sm row -ts 3,1", "", "-sm row, -ts 3,1"),
        ("-ctk q4_0 -ctv q8_0", "--cache-type-k q8_0", "-ctk q4_0 (kept in 8 bits, as q8_0)"),
        (
            "--cache-type-k iq4_nl -ctv q5_1",
            "--cache-type-k q8_0",
            "--cache-type-k iq4_nl (kept in 8 bits, as q8_0), -ctv q5_1 (kept in 8 bits, as q8_0)",
        ),
        ("-ctk q8_0 -ctv q8_0", "--cache-type-k q8_0", ""),
        ("-ctk f16", "--cache-type-k f16", ""),
        ("-ctk q8_0", "--cache-type-k f16", "-ctk q8_0 (kept as f16: keys and values have one type, give it for both)"),
        (
            "-ctk f16 -ctv q4_0",
            "--cache-type-k f16",
            "-ctv q4_0 (kept as f16: keys and values have one type, give it for both)",
        ),
        ("--verbose-prompt", "", "--verbose-prompt"),
        ("--reasoning-budget 512", "--thinking-token-budget 512", ""),
        ("--reasoning-budget 0", '{"enable_thinking": false}', ""),
        (
            "--fim-qwen-7b-spec -c 4096",
            "--model ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF:Q8_0 --draft ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF:Q8_0 "
            "--port 8012 --ctx-size 4096 --ubatch-size 1024",
            "",
        ),
        ("--fim-qwen-1.5b-default --port 80", "--model ggml-org/Qwen2.5-Coder-1.5B-Q8_0-GGUF:Q8_0 --port 80", ""),
    ],
)
def test_command_lines_that_people_have(words: str, means: str, idle: str) -> None:
    passage = llama_server(words.split(), {})
    said = " ".join(passage.words)
    for each in means.split(" --"):
        assert each in said
    assert ("--threads" in said) == ("--threads" in means)
    assert said.count("--port") == 1
    assert ", ".join(passage.idle) == idle


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
IN_JSON = json.dumps(YARN)


@pytest.mark.parametrize(
    ("words", "rope"),
    [
        ("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768", YARN),
        ("--rope-scaling yarn --rope-freq-scale 0.25 --yarn-orig-ctx 32768 --yarn-ext-factor 1", YARN),
        ("--rope-scale 4 --yarn-orig-ctx 32768 --yarn-ext-factor 1.0 --yarn-attn-factor 1.0", YARN),
        ("--rope-scaling yarn --rope-scale 4 --yarn-ext-factor 0", {"rope_type": "linear", "factor": 4.0}),
        ("--rope-scale 2", {"factor": 2.0}),
        ("--rope-scaling linear --rope-freq-scale 0.5", {"rope_type": "linear", "factor": 2.0}),
        ("--rope-scaling none --rope-scale 4", {"rope_type": "default"}),
        ("--rope-scaling yarn", None),
        ("--rope-freq-base 0 --rope-freq-scale 0 --yarn-orig-ctx 0 --yarn-beta-fast -1 --yarn-ext-factor -1", None),
        ("--rope-freq-base 1000000", {"rope_theta": 1e6}),
        (
            "--rope-scaling yarn --rope-scale 2 --yarn-beta-fast 16 --yarn-beta-slow 2",
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (f"--rope-scaling '{IN_JSON}'", YARN),
    ],
)
def test_rope_of_llama_server(words: str, rope: dict[str, object] | None) -> None:
    assert (llama_server(shlex.split(words), {}).rope or None) == rope


@pytest.mark.parametrize(
    ("words", "rope"),
    [
        (f"--rope-scaling '{IN_JSON}'", YARN),
        (f"""--hf-overrides '{{"rope_scaling": {IN_JSON}}}'""", YARN),
        (f"""--hf-overrides '{{"rope_parameters": {IN_JSON}, "max_model_len": 131072}}'""", YARN),
        (f"""--hf_overrides '{{"text_config": {{"rope_parameters": {IN_JSON}}}}}'""", YARN),
        (
            """--hf-overrides '{"rope_parameters": {"rope_type": "yarn", "factor": 3.0, "mrope_section": [24, 20, 20],
            "mrope_interleaved": true}}'""",
            {"rope_type": "yarn", "factor": 3.0},
        ),
        ('--rope-scaling \'{"type": "dynamic", "factor": 2}\'', {"rope_type": "dynamic", "factor": 2}),
        ("--rope-theta 500000", {"rope_theta": 500000}),
        ("""--hf-overrides.rope_scaling.rope_type yarn --hf-overrides.rope_scaling.factor 2""",
         {"rope_type": "yarn", "factor": 2}),
        ("""--hf-overrides '{"max_position_embeddings": 65536}'""", {"max_position_embeddings": 65536}),
        ("--hf-overrides '{}'", None),
    ],
)  # fmt: skip
def test_rope_of_vllm(words: str, rope: dict[str, object] | None) -> None:
    passage = vllm(["m", *shlex.split(words), "--max-model-len", "131072"], {})
    assert (passage.rope or None) == rope
    assert ("--rope-scaling" in passage.words) == bool(rope)


@pytest.mark.parametrize(("stated", "positions"), [("1", 65536), ("true", 65536), ("0", None), ("", None)])
def test_vllms_variable_allows_a_longer_context(stated: str, positions: int | None) -> None:
    passage = vllm(["m", "--max-model-len", "65536"], {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": stated})
    assert passage.rope.get("max_position_embeddings") == positions
    given = ["m", "--max-model-len", "65536", "--rope-scaling", IN_JSON]
    assert vllm(given, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": stated}).rope == YARN


@pytest.mark.parametrize(
    ("door", "words", "said"),
    [
        (llama_server, "--rope-scale much", "--rope-scale much: expected a number"),
        (llama_server, "--rope-scale 0", "--rope-scale 0: expected a number above 0"),
        (llama_server, "--rope-scale -1", "--rope-scale -1: expected a number above 0"),
        (llama_server, "--rope-scale nan", "--rope-scale nan: expected a number above 0"),
        (
            llama_server,
            "--rope-freq-base -1",
            "--rope-freq-base -1: expected a number above 0, or 0",
        ),
        (
            llama_server,
            "--rope-freq-scale -1",
            "--rope-freq-scale -1: expected a number above 0, or 0",
        ),
        (llama_server, "--yarn-orig-ctx -1", "--yarn-orig-ctx -1: expected a number above 0, or 0"),
        (
            llama_server,
            "--yarn-beta-slow 0",
            "--yarn-beta-slow 0: expected a number above 0, or -1",
        ),
        (llama_server, "--yarn-ext-factor 0.5", "--yarn-ext-factor 0.5: YaRN is applied wholly"),
        (llama_server, "--yarn-attn-factor 0.8", "state attention_factor"),
        (vllm, "--hf-overrides '{\"vocab_size\": 9}'", "vocab_size is the checkpoint's own"),
        (vllm, "--hf-overrides much", "expected a JSON object with keys of config.json"),
        (vllm, "--rope-scaling longrope", "expected 'default', 'linear'"),
        (vllm, "--rope-theta -3", "--rope-theta -3: "),
    ],
)
def test_rope_that_is_refused(door: Door, words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        door([*(["m"] if door is vllm else []), *shlex.split(words)], {})


@pytest.mark.parametrize(
    "words",
    [
        "llama-server -np 2 --max-batch-size 3",
        "llama-server -c 512 --max-seq-len 600",
        "llama-server -ub 64 --max-num-tokens 128",
        "vllm serve --max-num-seqs 2 --max-batch-size 3",
        "vllm serve --max-model-len 2k --max-seq-len 600",
    ],
)
def test_an_option_and_ours_for_it_exclude_each_other(capfd: pytest.CaptureFixture[str], words: str) -> None:
    done = call(capfd, *words.split())
    assert done.code == 2
    assert re.search(r"--\S+ and --\S+ both set \S+, to \d+ and \d+; give one of them", done.err)


def test_an_option_of_vllm_may_be_shortened() -> None:
    said = "m --served-model a --tensor_parallel=2 --speculative-conf.method ngram"
    words = " ".join(vllm(said.split(), {}).words)
    for part in ("--served-model-name a", "--tensor-parallel-size 2", '{"method": "ngram"}'):
        assert part in words
    assert "--max-num=9" in vllm(["m", "--max-num=9"], {}).words  # which begins several
    assert "--served-model" in llama_server(["--served-model", "a"], {}).words


def test_no_option_of_ours_is_taken_for_a_shortened_one() -> None:
    known = [*JOINED, *(name for row in table("vllm") for name in row.names)]
    for name in {each.replace("_", "-") for each in OURS if each.startswith("--")} - set(known):
        assert vllm(["m", f"{name}=x"], {}).words[1] == f"{name}=x"
