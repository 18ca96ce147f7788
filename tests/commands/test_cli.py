"""The command line as a user meets it: help, generate, errors, exit codes; transformers is the oracle."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import LETTERS, SPECIAL, Answer, Pair, greedy
from sametoken import SamplingParams, __version__
from sametoken.cli import COMMANDS, build_command, module_of
from sametoken.commands.generate import in_order
from sametoken.engine.completion import Chunk
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.speculation import SpeculativeConfig

ROOT = Path(__file__).parents[2]
NEEDED = {
    "evaluate": ["HEAD"],
    "export": ["HEAD"],
    "bench report": ["RUNS"],
    "bench explain": ["RUNS"],
    "bench compare": ["A", "B"],
}  # arguments
RECORD = {
    "index", "choice", "prompt", "text", "token_ids", "finish_reason", "stop_reason", "seconds", "tokens_per_second",
    "speculation",
}  # fmt: skip
SPECULATION = {
    "method", "target_forwards", "drafted", "accepted", "acceptance_length", "tokens_per_draft", "acceptance_rate",
    "accepted_lengths", "drafted_by", "plain", "draft_s", "verify_s", "other_s",
}  # fmt: skip


# --- the surface


def test_help_lists_the_commands_without_importing_what_they_need() -> None:
    code = (
        "import sys\nfrom sametoken.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit as e:\n"
        "    print(e.code, [n for n in ('torch', 'pydantic', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert all(f"\n│ {name} " in done.stdout for name in COMMANDS)


def test_no_command_shows_the_help(run: Any) -> None:
    assert run().out == run("--help").out == run("-h").out


def test_version(run: Any) -> None:
    assert run("--version") == run("-V") == Answer(0, f"sametoken {__version__}\n", "")


def test_the_package_is_the_command_line_too() -> None:
    done = subprocess.run([sys.executable, "-m", "sametoken", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sametoken {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(run: Any, command: str) -> None:
    answer = run(*command.split(), "--help")
    assert answer.code == 0
    shown = " ".join(answer.out.replace("│", "").split())
    options = module_of(command).OPTIONS
    assert len(options) > (0 if " " in command else 5)
    tables = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    for option in options:
        assert re.fullmatch(r"\S.{8,}\.", option.help), option
        if option.hidden:  # another server's, which the documentation explains
            assert f"`{option.spellings[0].partition('/')[0]}`" in tables
        else:
            assert option.help[1:24] in shown
            assert shown.count(f"{option.spellings[0].partition('/')[0][2:]} ") > 0
            assert option.group in shown


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_fits_the_terminal(run: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("serve", "--help").out.splitlines()
    panels = [line for line in lines if line[:1] in "╭│╰" and line]
    assert {len(line) for line in panels} == {width}
    assert [line.split("─")[1].strip() for line in panels if line[0] == "╭"] == [
        "Arguments", "The HTTP server", "The draft, and versions on the Hub", "Drafting",
        "Computation of the model", "The KV cache", "Options of other servers", "Another engine", "Help and errors",
    ]  # fmt: skip
    assert lines.index("  sametoken serve") < lines.index(panels[0]), "examples come first"


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_can_be_read(command: str) -> None:
    examples = module_of(command).EXAMPLES
    assert len(examples) in (2, 3, 4)
    for line in examples.values():
        program, *words = shlex.split(line)
        name = next(name for count in (3, 2, 1) if (name := " ".join(words[:count])) in COMMANDS)
        assert program == "sametoken"
        context = build_command(name).make_context(name, words[len(name.split()) :])
        assert context.params["debug"] is False


@pytest.mark.parametrize("command", COMMANDS)
def test_every_spelling_is_read_and_one_is_shown(run: Any, command: str) -> None:
    options = module_of(command).OPTIONS
    parser = build_command(command)
    words = set(run(*command.split(), "--help").out.split())
    for option in options:
        value = [] if option.kind is bool else ["7"]
        documented, *others = [pair.split("/") for pair in option.spellings]
        for spelling in [each for pair in (documented, *others) for each in pair]:
            sources = parser.make_context(command, [*NEEDED.get(command, ()), spelling, *value])
            assert sources.get_parameter_source(option.name).name == "COMMANDLINE", spelling
            if option.kind is bool:
                assert sources.params[option.name] is (spelling in [pair[0] for pair in (documented, *others)])
        assert not words & {each for pair in others for each in pair}


@pytest.mark.parametrize("command", ["generate", "bench", "evaluate", "synthesize", "verify", "quantize"])
@pytest.mark.parametrize("spelling", ["--max-tokens", "--output-len", "--osl", "--max-new-tokens", "--output_len"])
def test_the_length_of_an_output_has_every_tools_name(command: str, spelling: str) -> None:
    said = build_command(command).make_context(command, [*NEEDED.get(command, ()), spelling, "7"])
    assert said.params["max_tokens"] == 7


@pytest.mark.parametrize(
    "command",
    ["generate", "verify", "evaluate", "synthesize", "prepare", "train", "quantize", "bench", "deploy slurm synthesize",
     "deploy slurm train", "deploy ray prepare", "shard"],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["--data", "--prompts", "--data_path", "--data-path", "--input-path"])
def test_a_file_of_conversations_has_every_tools_name(command: str, spelling: str) -> None:
    said = build_command(command).make_context(command, [*NEEDED.get(command, ()), spelling, "file"])
    name = {"bench": "workload", "shard": "input_path"}.get(command, "data")
    assert said.params[name] in ("file", ["file"])


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("run", "did you mean 'chat'?"),
        ("vllm", "did you mean 'vllm serve'?"),
        ("sevre", "did you mean 'serve'?"),
        ("qqq", "No such command 'qqq'."),
    ],
)
def test_a_mistyped_command_names_the_nearest(run: Any, word: str, words: str) -> None:
    said = run(word)
    assert said.code == 2
    assert words in said.err


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_may_stand_before_the_command(run: Any, place: int) -> None:
    words = ["generate", "no/such/directory", "--prompt=a"]
    assert "Traceback" not in run(*words).err
    words.insert(place, "--debug")
    said = run(*words)
    assert said.code == 2
    assert "Traceback" in said.err
    assert said.err.splitlines()[-1].startswith("error: there is no directory no/such/directory")


def test_every_setting_has_an_option(run: Any) -> None:
    of_requests = {"speculative", "structured_outputs", "cache_salt", "shaping", "thought_bound"}
    names = {field.name for field in fields(SamplingParams)} - of_requests
    names |= SpeculativeConfig.model_fields.keys() | EngineConfig.model_fields.keys()
    names |= {f"kv_cache_{name}" for name in KVCacheConfig.model_fields}
    assert names <= {option.name for option in module_of("generate").OPTIONS}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sametoken be", {"bench", "bench report", "bench compare", "bench explain"}),
        ("sametoken generate --max-to", {"--max-tokens", "--max-total-draft-tokens"}),
        ("sametoken bench report --o", {"--out"}),
        ("sametoken generate --method ng", {"ngram"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(words: str, expected: set[str]) -> None:
    asked = {"_SAMETOKEN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-m", "sametoken"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **asked})
    assert set(done.stdout.splitlines()) == expected


# --- generate


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_target"])
def test_json_is_what_transformers_generates(run: Any, pair: Pair, method: str) -> None:
    prompts = ["one two one two", "abcabcabc"]
    drafting = ["--draft", pair.draft] if method == "draft_target" else []
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    answer = run(
        "generate", pair.target, *drafting, "--method", method, *given, "--max_tokens", "12", "--temperature", "0",
        "--json", "--max-draft-len", "3",
    )  # fmt: skip
    assert answer.code == 0
    records = [json.loads(line) for line in answer.out.splitlines()]
    assert [record["index"] for record in records] == [0, 1]
    for prompt, record in zip(prompts, records, strict=True):
        assert record.keys() == RECORD
        assert record["speculation"].keys() == SPECULATION
        assert record["prompt"] == prompt
        assert record["token_ids"] == greedy(pair.oracle, prompt, 12)
        assert record["finish_reason"] == "length"
        assert record["speculation"]["method"] == method
        assert len(record["speculation"]["accepted_lengths"]) <= 4


def test_logprobs_are_those_of_transformers(run: Any, pair: Pair) -> None:
    arguments = ["--prompt", "hello", "--max-tokens", "3", "--temperature", "0", "--json", "--logprobs", "2"]
    record = json.loads(run("generate", pair.target, *arguments).out)
    assert record.keys() == RECORD | {"logprobs"}
    ids = [len(SPECIAL) + LETTERS.index(letter) for letter in "hello"] + record["token_ids"]
    with torch.no_grad():
        expected = pair.oracle(torch.tensor([ids])).logits[0, 4:-1].log_softmax(-1)
    for row, entry in zip(expected, record["logprobs"], strict=True):
        best = row.topk(2)
        assert [top["token_id"] for top in entry["top_logprobs"]] == best.indices.tolist()
        assert entry["logprob"] == pytest.approx(best.values[0].item(), abs=1e-4)


def test_a_file_of_prompts_and_conversations_keeps_its_order(run: Any, pair: Pair, tmp_path: Path) -> None:
    lines = [
        {"prompt": "first\u2028line"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "x" * 60},
        {"prompt": "d"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    arguments = ["--max-tokens", "5", "--json", "--n", "2", "--seed", "3", "--max-batch-size", "3"]
    answer = run("generate", pair.target, "--prompts", str(file), *arguments)
    records = [json.loads(line) for line in answer.out.splitlines()]
    assert [(r["index"], r["choice"]) for r in records] == [(i, c) for i in range(4) for c in range(2)]
    assert [r["prompt"] for r in records[::2]] == [
        "first\u2028line", "user: hi\nassistant:", "x" * 60, "d"
    ]  # fmt: skip
    assert answer.err == ""


def test_chat_and_standard_input(run: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi")))
    answer = run(
        "generate", pair.target, "--prompt", "-", "--chat", "--max-tokens", "4", "--temperature", "0", "--json"
    )
    record = json.loads(answer.out)
    assert record["prompt"] == "user: hi\nassistant:"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "hi"}\n{"prompt": "ho"}')))
    answer = run("generate", pair.target, "--prompts", "-", "--max-tokens", "4", "--temperature", "0", "--json")
    assert [json.loads(line)["token_ids"] for line in answer.out.splitlines()] == [
        greedy(pair.oracle, text, 4) for text in ("hi", "ho")
    ]


def test_text_goes_to_stdout_and_its_cost_to_stderr(run: Any, pair: Pair) -> None:
    arguments = ["generate", pair.target, "--prompt", "hello", "--prompt", "bye", "--max-tokens", "9", "--seed", "5"]
    whole, streamed = run(*arguments), run(*arguments, "--stream")
    records = [json.loads(line) for line in run(*arguments, "--json").out.splitlines()]
    assert whole.out == streamed.out == "".join(record["text"] + "\n" for record in records)
    assert [line[:9] for line in whole.err.splitlines()] == ["[0.0] 9 t", "[1.0] 9 t"]


def test_sampling_options_reach_the_model(run: Any, pair: Pair) -> None:
    first = greedy(pair.oracle, "hello", 1)[0]
    arguments = ["generate", pair.target, "--prompt", "hello", "--temperature", "0", "--max-tokens", "6", "--json"]
    banned = json.loads(run(*arguments, "--logit-bias", f"{first}=-100").out)["token_ids"]
    assert first != banned[0]
    stopped = json.loads(run(*arguments, "--stop-token-id", str(first)).out)
    assert (stopped["token_ids"], stopped["stop_reason"]) == ([first], first)


def chunk(index: int, text: str, last: bool) -> Chunk:
    return Chunk(index, 0, text, [], [], [], None, object() if last else None)  # type: ignore[arg-type]


def test_chunks_of_a_batch_come_one_completion_after_the_other() -> None:
    mixed = [chunk(2, "e", True), chunk(0, "a", False), chunk(1, "c", False), chunk(0, "b", True), chunk(1, "d", True)]
    assert [piece.text for piece in in_order(mixed, 3, 1)] == ["a", "b", "c", "d", "e"]
    assert [piece.text for piece in in_order(iter(mixed[1:2]), 3, 1)] == ["a"]  # not held back


# --- errors

MISSING = "/no/such/directory"
USAGE = [
    (["generate", MISSING, "--prompt", "hi"], "there is no directory /no/such/directory"),
    (["generate", "MODEL"], "got no prompt"),
    (["generate", "MODEL", "--prompt", "a", "--prompts", "b"], "both --prompt and --data"),
    (["generate", "MODEL", "--prompt", ""], "the prompt is ''"),
    (["generate", "MODEL", "--prompt", "x" * 200], "the prompt has 200 tokens"),
    (["generate", "MODEL", "--prompt", "a", "--max-tokens", "0"], "max_tokens: got 0"),
    (["generate", "MODEL", "--prompt", "a", "--temperature", "-1"], "temperature: got -1.0"),
    (["generate", "MODEL", "--prompt", "a", "--temperature", "nan"], "temperature: got nan"),
    (["generate", "MODEL", "--prompt", "a", "--logit-bias", "3"], "--logit-bias '3'"),
    (["generate", "MODEL", "--prompt", "a", "--method", "draft_target"], "needs a draft model"),
    (["generate", "MODEL", "--prompt", "a", "--method", "magic"], "--method = 'magic'"),
    (["generate", "MODEL", "--prompt", "a", "--draft", "MODEL", "--method", "ngram"], "has no use with --method ngram"),
    (["generate", "MODEL", "--prompt", "a", "--max-draft-len", "0"], "error: --max-draft-len = 0: "),
    (["generate", "MODEL", "--prompt", "a", "--kv-cache-max-tokens", "0"], "error: --kv-cache-max-tokens = 0: "),
    (
        ["generate", "MODEL", "--prompt", "a", "--max-matching-ngram-size", "1", "--min-matching-ngram-size", "2"],
        "error: min_matching_ngram_size 2 exceeds max_matching_ngram_size 1",
    ),
    (["generate", "MODEL", "--prompt", "a", "--threads", "0"], "--threads 0"),
    (["generate", "MODEL", "--prompt", "a", "--json", "--stream"], "leave one of them out"),
    (["generate", "MODEL", "--prompts", MISSING], "No such file"),
    (["verify", "MODEL", "--method", "ngrm"], "did you mean 'ngram'?"),
    (["verify", "MODEL", "--method", "draft_target"], "needs a draft model"),
    (["verify", "MODEL", "--temperatures", "0,,1"], "--temperatures '0,,1'"),
    (["verify", "MODEL", "--temperatures", "0,inf"], "--temperatures '0,inf'"),
    (["verify", "MODEL", "--num-prompts", "0"], "--num-prompts 0"),
    (["demo", "MODEL", "--method", "none"], "give --draft PATH"),
    (["demo", "MODEL", "--draft", "MODEL", "--repeat", "0"], "--repeat 0"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_one_line_and_exit_code_2(run: Any, pair: Pair, arguments: list[str], words: str) -> None:
    answer = run(*[pair.target if word == "MODEL" else word for word in arguments])
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert words in answer.err


@pytest.mark.parametrize("arguments", [["deploy"], ["deploy", "--help"]])
def test_the_first_of_two_words_lists_its_commands(run: Any, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.code == 0
    assert {"deploy plan", "deploy two-node", "deploy dynamo"} <= {name for name in COMMANDS if name in answer.out}
    assert "generate " not in answer.out
    assert "expected one of: deploy plan, " in run("deploy", "plam").err


@pytest.mark.parametrize("arguments", [["generate", "--temprature", "1"], ["generat"], ["generate", "--n", "one"]])
def test_what_cannot_be_parsed_is_exit_code_2(run: Any, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Error" in answer.err
    assert "Traceback" not in answer.err


BAD_LINES = [
    ("{oops", "is not JSON"),
    ("[1]", "got [1], expected an object with prompt, messages or conversations"),
    ('{"prompt": "a", "messages": []}', "no message of a user"),
    ('{"prompt": 3}', "prompt is 3"),
    ('{"prompt": "a", "max_tokens": 3}', "unknown key 'max_tokens'"),
    ('{"messages": []}', "no message of a user"),
    ('{"messages": [{"content": "x"}]}', "message 1: the role is 'None'"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_a_bad_line_is_named_before_anything_is_generated(
    run: Any, pair: Pair, tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    answer = run("generate", pair.target, "--prompts", str(file), "--max-tokens", "2")
    assert (answer.code, answer.out) == (2, "")
    assert "prompts.jsonl, line 3" in answer.err
    assert words in answer.err


def test_files_that_are_no_prompts(run: Any, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for content, words in ((b"\n \n", "is empty"), (b"\xff\xfe", "byte 0 is not UTF-8")):
        file.write_bytes(content)
        answer = run("generate", pair.target, "--prompts", str(file))
        assert answer.code == 2
        assert words in answer.err


def test_debug_shows_the_traceback(run: Any) -> None:
    answer = run("generate", MISSING, "--prompt", "hi", "--debug")
    assert answer.code == 2
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("error: there is no directory")


def test_an_interrupt_is_exit_code_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sametoken.commands.generate.command", interrupted)
    assert run("generate", "embedded", "--prompt", "hi") == Answer(130, "", "")


def test_a_closed_pipe_is_quiet(pair: Pair) -> None:
    command = [sys.executable, "-m", "sametoken.cli", "generate", pair.target, "--prompt", "a", "--max-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("words", [["vllm", "serve", "no/such/directory"], ["llama-server", "-m", "no/such/directory"]])
def test_debug_may_stand_before_another_programs_name(run: Any, words: list[str]) -> None:
    said = run("--debug", *words)
    assert said.code == 2
    assert "Traceback" in said.err
    assert "there is no directory no/such/directory" in said.err
