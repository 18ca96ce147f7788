"""The command line as a user meets it: output, errors, exit codes; transformers is the oracle of what is generated."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel

from foretoken import LLM, LosslessnessError, SamplingParams, embedded
from foretoken.cli import COMMANDS, main
from foretoken.commands import demo, race
from foretoken.commands.generate import in_order
from foretoken.commands.prompts import BUILT_IN, Spelled
from foretoken.commands.verify import verify
from foretoken.config import EngineConfig, KVCacheConfig, SpeculativeConfig
from foretoken.engine.completion import Chunk
from foretoken.engine.runner import Batch, Outcome, Runner
from tiny_models import build, save

SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = [chr(code) for code in range(32, 127)]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
RECORD = {
    "index", "choice", "prompt", "text", "token_ids", "finish_reason", "stop_reason", "seconds", "tokens_per_second",
    "speculation",
}  # fmt: skip
SPECULATION = {
    "method", "target_forwards", "drafted", "accepted", "acceptance_length", "acceptance_rate", "accepted_lengths",
    "draft_s", "verify_s", "other_s",
}  # fmt: skip


class Pair(NamedTuple):
    """A tiny target and draft whose tokens are letters, and the target as transformers has it."""

    target: str
    draft: str
    oracle: PreTrainedModel


def speak(directory: Path) -> None:
    """Adds a tokenizer of single letters and a chat template to a checkpoint."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 0), ("draft", 1)):
        save("llama-2", root / name, seed=seed)
        speak(root / name)
    return Pair(str(root / "target"), str(root / "draft"), build("llama-2", 0))


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Answer(int(ended.value.code or 0), *capfd.readouterr())

    return call


def greedy(model: PreTrainedModel, text: str, count: int) -> list[int]:
    """What transformers continues a text with."""
    ids = torch.tensor([[len(SPECIAL) + LETTERS.index(letter) for letter in text]])
    out = model.generate(ids, do_sample=False, max_new_tokens=count, use_cache=False, pad_token_id=0)
    return [int(token) for token in out[0, ids.shape[1] :]]


class Broken(Runner):
    """A verifier with a fault: after a draft, the target's own next token is replaced."""

    def __init__(self, sound: Runner) -> None:
        super().__init__(sound.decoder, sound.cache, sound.taps)

    def run(self, batch: Batch, sampling: Any) -> Outcome:
        outcome = super().run(batch, sampling)
        if outcome.verdict is None or batch.draft.tokens.shape[1] == 1:
            return outcome
        return outcome._replace(verdict=outcome.verdict._replace(bonus=(outcome.verdict.bonus + 1) % 100))


# --- the surface


def test_help_lists_the_commands_without_importing_what_they_need() -> None:
    code = (
        "import sys\nfrom foretoken.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit as e:\n"
        "    print(e.code, [n for n in ('torch', 'pydantic', 'rich', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_no_command_shows_the_help(run: Any) -> None:
    assert run().out == run("--help").out


def test_version(run: Any) -> None:
    assert run("--version") == Answer(0, "foretoken 0.1.0\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(run: Any, command: str) -> None:
    answer = run(command, "--help")
    assert answer.code == 0
    shown = " ".join(answer.out.split())
    options = import_module(f"foretoken.commands.{command}").OPTIONS
    assert len(options) > 20
    for option in options:
        assert re.fullmatch(r"\S.{8,}\.", option.help), option
        assert option.help[:24] in shown


def test_every_setting_has_an_option_in_both_spellings(run: Any) -> None:
    words = set(run("generate", "--help").out.replace(",", " ").replace("/", " ").split())
    names = {field.name for field in fields(SamplingParams)} - {"speculative"}
    names |= SpeculativeConfig.model_fields.keys() | EngineConfig.model_fields.keys()
    names |= {f"kv_cache_{name}" for name in KVCacheConfig.model_fields}
    wanted = {f"--{name}" for name in names} | {f"--{name.replace('_', '-')}" for name in names}
    assert wanted <= words


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
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    answer = run(
        "generate", pair.target, "--prompt", "-", "--chat", "--max-tokens", "4", "--temperature", "0", "--json"
    )
    record = json.loads(answer.out)
    assert record["prompt"] == "user: hi\nassistant:"
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "hi"}\n{"prompt": "ho"}'))
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
    return Chunk(index, 0, text, [], [], None, object() if last else None)  # type: ignore[arg-type]


def test_chunks_of_a_batch_come_one_completion_after_the_other() -> None:
    mixed = [chunk(2, "e", True), chunk(0, "a", False), chunk(1, "c", False), chunk(0, "b", True), chunk(1, "d", True)]
    assert [piece.text for piece in in_order(mixed, 3, 1)] == ["a", "b", "c", "d", "e"]
    assert [piece.text for piece in in_order(iter(mixed[1:2]), 3, 1)] == ["a"]  # not held back


# --- errors

MISSING = "/no/such/directory"
USAGE = [
    (["generate", MISSING, "--prompt", "hi"], "there is no directory /no/such/directory"),
    (["generate", "MODEL"], "got no prompt"),
    (["generate", "MODEL", "--prompt", "a", "--prompts", "b"], "both --prompt and --prompts"),
    (["generate", "MODEL", "--prompt", ""], "the prompt is ''"),
    (["generate", "MODEL", "--prompt", "x" * 200], "the prompt has 200 tokens"),
    (["generate", "MODEL", "--prompt", "a", "--max-tokens", "0"], "max_tokens: got 0"),
    (["generate", "MODEL", "--prompt", "a", "--temperature", "-1"], "temperature: got -1.0"),
    (["generate", "MODEL", "--prompt", "a", "--temperature", "nan"], "temperature: got nan"),
    (["generate", "MODEL", "--prompt", "a", "--logit-bias", "3"], "--logit-bias '3'"),
    (["generate", "MODEL", "--prompt", "a", "--method", "draft_target"], "needs a draft model"),
    (["generate", "MODEL", "--prompt", "a", "--method", "magic"], "SpeculativeConfig.method = 'magic'"),
    (["generate", "MODEL", "--prompt", "a", "--draft", "MODEL", "--method", "ngram"], "has no use with --method ngram"),
    (["generate", "MODEL", "--prompt", "a", "--max-draft-len", "0"], "SpeculativeConfig.max_draft_len = 0"),
    (["generate", "MODEL", "--prompt", "a", "--threads", "0"], "--threads 0"),
    (["generate", "MODEL", "--prompt", "a", "--json", "--stream"], "leave one of them out"),
    (["generate", "MODEL", "--prompts", MISSING], "No such file"),
    (["verify", "MODEL", "--method", "ngrm"], "did you mean 'ngram'?"),
    (["verify", "MODEL", "--method", "draft_target"], "needs a draft model"),
    (["verify", "MODEL", "--temperatures", "0,,1"], "--temperatures '0,,1'"),
    (["verify", "MODEL", "--temperatures", "0,inf"], "--temperatures '0,inf'"),
    (["verify", "MODEL", "--num-prompts", "0"], "--num-prompts 0"),
    (["demo", "MODEL"], "give --draft PATH"),
    (["demo", "MODEL", "--draft", "MODEL", "--repeat", "0"], "--repeat 0"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_one_line_and_exit_code_2(run: Any, pair: Pair, arguments: list[str], words: str) -> None:
    answer = run(*[pair.target if word == "MODEL" else word for word in arguments])
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert words in answer.err


@pytest.mark.parametrize("arguments", [["generate", "--temprature", "1"], ["generat"], ["generate", "--n", "one"]])
def test_what_cannot_be_parsed_is_exit_code_2(run: Any, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Error" in answer.err
    assert "Traceback" not in answer.err


BAD_LINES = [
    ("{oops", "is not JSON"),
    ("[1]", "expected an object with either prompt or messages"),
    ('{"prompt": "a", "messages": []}', "either prompt or messages"),
    ('{"prompt": 3}', "prompt is 3"),
    ('{"prompt": "a", "max_tokens": 3}', "unknown key 'max_tokens'"),
    ('{"messages": []}', "at least one object"),
    ('{"messages": [{"content": "x"}]}', "role and content"),
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

    monkeypatch.setattr("foretoken.commands.generate.command", interrupted)
    assert run("generate", "--prompt", "hi") == Answer(130, "", "")


def test_a_closed_pipe_is_quiet(pair: Pair) -> None:
    command = [sys.executable, "-m", "foretoken.cli", "generate", pair.target, "--prompt", "a", "--max-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


# --- verify


def test_verify_compares_every_method_and_is_content(run: Any, pair: Pair) -> None:
    arguments = ["--draft", pair.draft, "--num-prompts", "3", "--max-tokens", "8"]
    answer = run("verify", pair.target, *arguments)
    assert answer.code == 0
    rows = [line.split("│")[1:-1] for line in answer.out.splitlines() if line.startswith("│")]
    cases = [tuple(cell.strip() for cell in row[:3]) for row in rows]
    ways = [(m, b) for m in ("ngram", "suffix", "draft_target") for b in ("one by one", "3 together")]
    expected = [(m, t, b) for t in ("0", "0.7", "1") for m, b in [("none", "3 together"), *ways]]
    assert sorted(cases) == sorted(expected)
    assert {row[5].strip() for row in rows} == {"equal"}
    assert answer.out.splitlines()[-1].startswith("all equal: ")


def test_verify_finds_a_broken_verifier_and_says_where(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(pair.target, pair.draft)
    llm.engine.runner = Broken(llm.engine.runner)
    text = "one two one two"
    prompts = [Spelled(text, llm.tokenizer.encode(text))]
    assert verify(llm, prompts, SamplingParams(max_tokens=8), [0.0], ["draft_target"]) == 1
    out = capsys.readouterr().out
    assert "different" in out
    last = out.splitlines()[-1]
    assert last.startswith(f"first difference: method draft_target, temperature 0, one by one, prompt 0 {text!r}, ")
    position = int(last.partition("position ")[2].partition(":")[0])
    expected = greedy(pair.oracle, text, 8)
    assert f"plain {expected[position]} " in last
    ids = torch.tensor([prompts[0].ids + expected[:position]])
    with torch.no_grad():
        best, second = pair.oracle(ids).logits[0, -1].topk(2).values.tolist()
    assert float(last.rpartition(" ")[2]) == pytest.approx(best - second, abs=1e-3)


def test_the_built_in_prompts_are_many_and_distinct() -> None:
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 24


# --- demo


def test_demo_prints_both_sides_without_control_codes(run: Any, pair: Pair) -> None:
    arguments = ["--draft", pair.draft, "--max-tokens", "10", "--repeat", "2"]
    answer = run("demo", pair.target, *arguments)
    assert answer.code == 0
    assert "\x1b" not in answer.out
    assert all(f"> {prompt}" in answer.out for prompt in demo.PROMPTS)
    assert answer.out.count("speculative, [drafted and accepted]:") == len(demo.PROMPTS)
    assert "The token ids are identical: 40 tokens" in answer.out


def test_demo_replays_in_a_terminal(pair: Pair) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, highlight=False)
    demo.show(LLM(pair.target, pair.target), SamplingParams(max_tokens=4, temperature=0.0), 1, console)
    assert "\x1b[1;32m" in screen.getvalue()  # the same model as its own draft: accepted
    assert screen.getvalue().count(" plain ") >= len(demo.PROMPTS)
    assert "\x1b[32m" not in screen.getvalue()


def test_demo_refuses_outputs_that_differ(pair: Pair) -> None:
    llm = LLM(pair.target, pair.draft)
    llm.engine.runner = Broken(llm.engine.runner)
    with pytest.raises(LosslessnessError, match=r"output token \d+ differs"):
        demo.show(llm, SamplingParams(max_tokens=8, temperature=0.0), 1, Console(file=io.StringIO()))


def test_a_race_counts_what_its_completions_say(pair: Pair) -> None:
    llm = LLM(pair.target, pair.target)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = race.race(llm, llm.tokenizer.encode("hello"), params, 2)
    for take in found:
        assert "".join(race.pieces(llm, take.completion, params)) == take.completion.text
        assert take.tokens_at(0.0) == 0
        assert take.tokens_at(take.frames[-1][0]) == len(take.completion.token_ids) == 12
    assert len(found.plain.frames) == 12
    assert len(found.speculative.frames) < 12
    assert race.score([found]).acceptance_length == pytest.approx(
        12 / found.speculative.completion.speculation.target_forwards
    )


def test_brackets_hold_what_was_drafted() -> None:
    assert demo._bracketed(["a", "b", "c", "", "d", "e"], [False, True, True, False, True, False]) == "a[bcd]e"
    assert demo._bracketed(["a", "b"], [True, True]) == "[ab]"


# --- the embedded pair


def test_the_embedded_pair_is_the_default(run: Any) -> None:
    arguments = ["--prompt", "Tell me a story.", "--chat", "--max-tokens", "24", "--temperature", "0", "--json"]
    speculative = json.loads(run("generate", *arguments).out)
    plain = json.loads(run("generate", "embedded", "--method", "none", *arguments).out)
    named = json.loads(run("generate", str(embedded.TARGET), "--draft", str(embedded.DRAFT), *arguments).out)
    assert speculative["token_ids"] == plain["token_ids"] == named["token_ids"]
    assert speculative["speculation"]["method"] == "draft_target"
    assert speculative["speculation"]["acceptance_length"] > 1.5
    assert len(speculative["text"].split()) > 10


def test_the_embedded_pair_passes_its_proof(run: Any) -> None:
    answer = run("verify", "--num-prompts", "2", "--max-tokens", "16", "--dtype", "bfloat16")
    assert answer.code == 0
    assert "draft_target" in answer.out
