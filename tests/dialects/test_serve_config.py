"""`sametoken serve` by other servers' words: what wins, what is refused, and the published requests on a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_checks import Pair, call
from sametoken import LLM, SamplingParams, embedded
from sametoken.commands import serve
from sametoken.commands.models import open_llm
from sametoken.commands.options import Chosen
from sametoken.commands.resolution import HINTS, check_choice, resolve
from sametoken.errors import CheckpointError, ConfigError
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.server import ServerConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.server.listen import bind
from server_checks import Running, running

PLAYBOOKS = Path(__file__).parents[1] / "playbooks"
# The bodies that the documents send with curl, word by word.
TRAIN = (
    "Solve the following problem step by step. If a train travels 180 km in 3 hours, and then slows down by 20% for "
    "the next 2 hours, what is the total distance traveled? Show all intermediate calculations and provide a final "
    "numeric answer."
)
COMPLETIONS = [
    {"model": "openai/gpt-oss-120b", "prompt": TRAIN, "max_tokens": 300, "temperature": 0.7},
    {
        "model": "nvidia/Llama-3.3-70B-Instruct-FP4",
        "prompt": "Explain the benefits of speculative decoding:",
        "max_tokens": 150,
        "temperature": 0.7,
    },
]
CHATS = [
    {
        "model": "nvidia/Qwen3-235B-A22B-FP4",
        "messages": [{"role": "user", "content": "Paris is great because"}],
        "max_tokens": 64,
    },
    {
        "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "messages": [{"role": "user", "content": "Write a poem about why Sakura trees are beautiful."}],
        "max_tokens": 250,
    },
]


def chosen(**given: Any) -> Chosen:
    """The options of the command, these among them given."""
    values = {option.name: option.default for option in serve.OPTIONS}
    assert given.keys() <= values.keys()
    return Chosen({**values, **given}, given)


def resolved(model: str | None = None, **given: Any) -> dict[str, Any]:
    resolution = resolve(model, chosen(**given))
    return serve.resolved(model, resolution, serve.server_config(resolution.values))


def written(directory: Path, text: str) -> str:
    file = directory / "spec.yml"
    file.write_text(text)
    return str(file)


# --- what wins


def test_every_setting_has_a_type_to_check_others_words_by() -> None:
    names = {option.name for option in serve.OPTIONS}
    assert HINTS.keys() <= names
    groups = {SpeculativeConfig: "", EngineConfig: "", KVCacheConfig: "kv_cache_", ServerConfig: ""}
    assert {prefix + name for owner, prefix in groups.items() for name in owner.model_fields} <= HINTS.keys()


@pytest.mark.parametrize(
    ("model", "playbook", "flags"),
    [
        ("openai/gpt-oss-120b", "eagle", {}),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "draft_target", {"kv_cache_free_gpu_memory_fraction": 0.9}),
    ],
)
def test_the_playbooks_commands(model: str, playbook: str, flags: dict[str, Any]) -> None:
    file = str(PLAYBOOKS / f"{playbook}.yml")
    info = resolved(
        model, backend="pytorch", tensor_parallel_size=1, max_batch_size=1, extra_llm_api_options=file, **flags
    )
    drafts = "/opt/gpt-oss-120b-Eagle3/" if playbook == "eagle" else "/opt/Llama-3.1-8B-Instruct-FP4/"
    assert (info["model"], info["draft"], info["engine"]["max_batch_size"]) == (model, drafts, 1)
    assert info["speculative"]["max_draft_len"] == {"eagle": 5, "draft_target": 4}[playbook]
    assert info["speculative"]["method"] == {"eagle": None, "draft_target": "draft_target"}[playbook]
    assert info["kv_cache"]["enable_block_reuse"] is False
    assert info["kv_cache"]["free_memory_fraction"] == 0.9
    assert info["origins"]["draft"] == f"{playbook}.yml: speculative_config.speculative_model_dir"
    assert info["origins"]["max_batch_size"] == "--max-batch-size"
    assert any("disable_overlap_scheduler" in note for note in info["notes"])


def test_the_command_of_two_nodes_serves_in_two_processes() -> None:
    rest = {
        "backend": "pytorch", "max_num_tokens": 1024, "port": 8355, "host": "0.0.0.0",
        "extra_llm_api_options": str(PLAYBOOKS / "two_nodes.yml"),
    }  # fmt: skip
    info = resolved("nvidia/Qwen3-235B-A22B-FP4", tensor_parallel_size=2, **rest)
    assert (info["engine"]["tensor_parallel_size"], info["speculative"]["max_draft_len"]) == (2, 3)
    assert (info["engine"]["max_num_tokens"], info["server"]["port"], info["server"]["host"]) == (1024, 8355, "0.0.0.0")


def test_vllms_options() -> None:
    draft = '{"method": "eagle3", "model": "some/head", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}'
    info = resolved(
        "m",
        speculative_config=draft,
        max_model_len=4096,
        max_num_seqs=3,
        api_key=["token-abc123"],
        tensor_parallel_size=1,
    )
    assert (info["draft"], info["speculative"]["method"], info["speculative"]["max_draft_len"]) == (
        "some/head", "eagle3", 2,
    )  # fmt: skip
    assert (info["engine"]["max_seq_len"], info["engine"]["max_batch_size"]) == (4096, 3)
    assert info["server"]["api_key"] == 1
    assert "token-abc123" not in repr(info) + "".join(serve.described(info))


@pytest.mark.parametrize("spelling", ["--quantization=modelopt", "--quantization modelopt_fp4"])
def test_the_quantization_of_a_checkpoint_is_taken_with_a_note(
    capfd: pytest.CaptureFixture[str], spelling: str
) -> None:
    """As the document says for the server that writes training data of a model that ModelOpt quantised."""
    name = spelling.replace("=", " ").split()[1]
    words = (
        "deploy",
        "plan",
        "org/model",
        "--api-key",
        "token-abc123",
        *spelling.replace("-q ", "--quantization=").split(),
    )
    said = call(capfd, *words)
    assert said.err == f"note: --quantization {name} has no effect here: the checkpoint states how it is quantised\n"
    assert "quantization" not in said.out
    assert f"--quantization {name}" in call(capfd, *words, "--engine", "vllm").out
    assert "quantization" not in call(capfd, *words[:3], *words[5:], "--engine", "trtllm").out
    values = resolve("embedded", chosen(quantization=name)).values
    assert values["quantization"] == "none"


LLAMA = (
    "-c 4096 -np 4 --spec-type draft-simple --draft-max 8 --draft-min 2 -ub 256 -ctk q8_0 -ctv q8_0 -fa on -cb "
    "-ngl 99 -t 2 -a gpt,four --port 8080"
)


def test_llama_servers_command(capfd: pytest.CaptureFixture[str]) -> None:
    said = call(capfd, "deploy", "plan", "-m", "embedded", "-md", "embedded", *LLAMA.split())
    assert said.out.replace(" \\\n   ", "") == (
        "sametoken serve embedded --draft embedded --method draft_target --max-draft-len 8 --max-num-tokens 256 "
        "--max-seq-len 4096 --max-batch-size 4 --served-model-name gpt --served-model-name four "
        "--kv-cache-dtype int8 --threads 2 --host 127.0.0.1 --port 8080\n"
    )
    assert [line.partition(" has no effect")[0] for line in said.err.splitlines()] == [
        "note: --gpu-layers = '99'",
        "note: --draft-min = 2",
    ]
    for words in ("-fa -c 64", "-c 64 -fa"):  # a switch in older releases
        assert "--max-seq-len 64" in call(capfd, "deploy", "plan", *words.split()).out


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("-fa off", "--flash-attn = 'off': .*write -fa auto"),
        ("-ctk q8_0 -ctv f16", "--cache-type-k and --cache-type-v both set kv_cache_dtype"),
        ("--spec-type draft-dspark", "--spec-type = 'draft-dspark': expected one of none, draft-simple"),
        ("-np 0", "--parallel = 0: expected a value greater"),
        ("-c -1", "--ctx-size = -1: expected a value greater"),
        ("--draft 16", "--draft 16: expected a draft model or a head; .* is --max-draft-len"),
        ("-m other", "got the model twice, embedded and --model other"),
    ],
)
def test_what_llama_server_alone_has_is_refused(words: str, refusal: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = call(capfd, "deploy", "plan", "embedded", *words.split())
    assert said.code == 2
    assert re.search(refusal, said.err)


def test_automatic_sizes_of_llama_server_are_our_defaults() -> None:
    engine = resolved("m", ctx_size=0, parallel=-1)["engine"]
    assert (engine["max_seq_len"], engine["max_batch_size"]) == (None, EngineConfig().max_batch_size)


def test_options_win_over_the_file_also_where_they_say_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "max_num_tokens: 1024\nmax_batch_size: 4\nspeculative_config: {decoding_type: NGram}")
    default = EngineConfig().max_num_tokens
    info = resolved("m", extra_llm_api_options=file, max_num_tokens=default)
    assert (info["engine"]["max_num_tokens"], info["engine"]["max_batch_size"]) == (default, 4)
    assert info["notes"] == [f"spec.yml: max_num_tokens = 1024 gives way to --max-num-tokens = {default}"]
    assert info["origins"] == {
        "max_batch_size": "spec.yml: max_batch_size",
        "max_num_tokens": "--max-num-tokens",
        "method": "spec.yml: speculative_config.decoding_type",
    }
    again = resolved("m", extra_llm_api_options=file, speculative_config='{"method": "suffix"}')
    assert again["speculative"]["method"] == "suffix"
    assert again["notes"] == [f"speculative_config of {file} gives way to --speculative-config"]


def test_two_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="both set max_draft_len, to 5 and 3; give one"):
        resolve("m", chosen(speculative_config='{"method": "ngram", "num_speculative_tokens": 5}', max_draft_len=3))
    with pytest.raises(ConfigError, match="--max-model-len and --max-seq-len both set max_seq_len"):
        resolve("m", chosen(max_model_len=64, max_seq_len=65))
    same = resolved("m", max_model_len=64, max_seq_len=64, draft_len_schedule="4:4")
    assert same["engine"]["max_seq_len"] == 64
    assert same["speculative"]["draft_len_schedule"] == {"4": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv_cache_config: {free_gpu_memory_fraction: .nan}", "free_gpu_memory_fraction = nan: expected"),
        ("max_batch_size: " + "9" * 5000, "spec.yml is not YAML: Exceeds the limit"),
        ("kv_cache_config: &a {max_tokens: *a}", "max_tokens = .*: expected a valid integer"),
        ("max_batch_size: 0", "spec.yml: max_batch_size = 0: expected a value greater than"),
        ("max_batch_size: true", "spec.yml: max_batch_size = True: expected a valid integer"),
        ("kv_cache_config: {free_gpu_memory_fraction: 1.5}", "free_gpu_memory_fraction = 1.5: expected a value less"),
        ("speculative_config: {decoding_type: NGram, max_draft_len: 0}", "max_draft_len = 0: expected a value greater"),
        ("speculative_config: {decoding_type: Eagle, speculative_model: ''}", "speculative_model is empty"),
        ("speculative_config: {decoding_type: Eagle, speculative_model: 3}", "speculative_model = 3: expected"),
        ("speculative_config: {decoding_type: Eagle}", "decoding_type needs a head; give its directory or Hub id"),
        (
            "speculative_config: {decoding_type: NGram, max_draft_len: 4, draft_len_schedule: {4: 3}}",
            "draft_len_schedule gives drafts of 3 tokens to batches of up to 4, and of 3 tokens at most",
        ),
        (
            "speculative_config: {decoding_type: NGram, max_concurrency: 4, draft_len_schedule: {4: 4}}",
            "draft_len_schedule and max_concurrency exclude each other",
        ),
        (
            "speculative_config: {decoding_type: NGram, speculative_model: x}",
            "--draft x has no use with --method ngram",
        ),
    ],
)
def test_values_that_cannot_be_name_the_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved("m", extra_llm_api_options=written(tmp_path, text))


@pytest.mark.parametrize("name", ["api_key", "served_model_name", "chat_template"])
@pytest.mark.parametrize(("text", "words"), [(" ", "is empty"), ("\udcff", "is not text in UTF-8")])
def test_texts_that_no_reply_could_repeat_are_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved("m", **{name: text if name == "chat_template" else [text]})


def test_keys_of_the_environment_may_have_spaces_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.KEYS_VARIABLE, "a, b ,,")
    assert serve.server_config(resolve("m", chosen(api_key=["c"])).values).api_key == ("c", "a", "b")
    monkeypatch.setenv(serve.KEYS_VARIABLE, "\udcff")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        serve.server_config(resolve("m", chosen()).values)


def test_numbers_of_thousands_of_digits_and_hosts_of_hundreds_of_letters_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not JSON: Exceeds the limit"):
        resolve("m", chosen(speculative_config=f'{{"num_speculative_tokens": {"9" * 5000}}}'))
    with pytest.raises(ConfigError, match="cannot listen on aaa"), bind(ServerConfig(host="a" * 300)):
        pass


def test_gates_and_schedules_of_the_file_reach_the_engine(pair: Pair, tmp_path: Path) -> None:
    text = (
        "speculative_config: {decoding_type: Draft_Target, speculative_model: DRAFT, max_draft_len: 3,"
        " draft_len_schedule: {2: 3, 4: 1}, acceptance_window: 5, acceptance_length_threshold: 0.5}\n"
        "kv_cache_config: {enable_block_reuse: false, tokens_per_block: 16, max_tokens: 512}\nmax_seq_len: 100\n"
    )
    file = written(tmp_path, text.replace("DRAFT", pair.draft))
    llm = open_llm(pair.target, resolve(pair.target, chosen(extra_llm_api_options=file)).values)
    assert (llm.method, llm.max_seq_len) == ("draft_target", 100)
    assert llm.speculative == SpeculativeConfig(
        method="draft_target", max_draft_len=3, draft_len_schedule={2: 3, 4: 1}, acceptance_window=5,
        acceptance_length_threshold=0.5,
    )  # fmt: skip


# --- models


def test_without_a_model_the_embedded_target_and_its_head_are_served() -> None:
    info = resolved()
    assert (info["model"], info["draft"], info["speculative"]["method"]) == (
        embedded.NAME, embedded.HEAD_NAME, "eagle3",
    )  # fmt: skip
    assert resolved(method="draft_target")["draft"] == embedded.NAME
    assert resolved(method="ngram")["draft"] is None
    assert resolved("other")["draft"] is None


def test_decoding_type_eagle_takes_either_head_and_nothing_else(tmp_path: Path) -> None:
    text = "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model: DRAFT}"
    for draft, method in ((embedded.HEAD, "eagle3"), (embedded.DRAFT, "draft_target")):
        resolution = resolve(None, chosen(extra_llm_api_options=written(tmp_path, text.replace("DRAFT", str(draft)))))
        llm = open_llm(None, resolution.values)
        assert llm.method == method
        if method == "eagle3":
            check_choice(resolution, llm.method, llm.methods)
        else:
            with pytest.raises(ConfigError, match="the draft is made for method 'draft_target', expected eagle3 or"):
                check_choice(resolution, llm.method, llm.methods)
    alone = resolved(extra_llm_api_options=written(tmp_path, "speculative_config: {decoding_type: Eagle}"))
    assert alone["draft"] == embedded.HEAD_NAME


def test_the_command_reports_a_draft_that_is_not_there_and_keys_that_do_not_exist(run: Any, tmp_path: Path) -> None:
    arguments = ["serve", "embedded", "--port", "0", "--backend", "pytorch", "--tp_size", "1", "--config"]
    text = (PLAYBOOKS / "eagle.yml").read_text()
    answer = run(*arguments, written(tmp_path, text.replace("/opt/gpt-oss-120b-Eagle3/", str(tmp_path / "none"))))
    assert answer.code == 2
    assert re.search(r"^error: .*none", answer.err, flags=re.MULTILINE)
    answer = run(*arguments, written(tmp_path, text.replace("max_draft_len", "max_draft_length")))
    assert answer.code == 2
    assert "unknown key 'max_draft_length': did you mean 'max_draft_len'" in answer.err
    answer = run("serve", "embedded", "--max-draft-length", "3")
    assert answer.code == 2
    assert "--max-draft-len" in answer.err


def test_another_tokenizer_and_another_template(pair: Pair, tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    said = [{"role": "user", "content": "hi"}]
    for given in (template, str(tmp_path / "t.jinja")):
        llm = LLM(pair.target, tokenizer=pair.draft, chat_template=given)
        assert llm.tokenizer.decode(llm.render_chat(said)) == "<hi>"
        assert llm.tokenizer.eos_ids == LLM(pair.target).tokenizer.eos_ids
    with pytest.raises(CheckpointError, match=r"no\.jinja: No such file.*expected Jinja in UTF-8, a file or a text"):
        LLM(pair.target, chat_template=str(tmp_path / "no.jinja"))
    with pytest.raises(CheckpointError, match="the chat template is not valid"):
        LLM(pair.target, chat_template="{% for %}")
    with pytest.raises(ConfigError, match=r"tokens and the target .* rows; expected a tokenizer"):
        LLM(pair.target, tokenizer=embedded.NAME)


# --- the published requests


@pytest.fixture(scope="module")
def served(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, Any]]]:
    """The embedded target by the EAGLE playbook's file, whose head is not on this machine."""
    text = (PLAYBOOKS / "eagle.yml").read_text().replace("/opt/gpt-oss-120b-Eagle3/", str(embedded.HEAD))
    file = written(tmp_path_factory.mktemp("config"), text)
    names = [str(body["model"]) for body in (*COMPLETIONS, *CHATS)]
    resolution = resolve(None, chosen(extra_llm_api_options=file, max_batch_size=4, served_model_name=names))
    server = serve.server_config(resolution.values)
    info = serve.resolved(None, resolution, server)
    with running(open_llm(None, resolution.values), info, served_model_name=names) as running_server:
        yield running_server, info


@pytest.fixture(scope="module")
def plain(one_thread: None) -> LLM:
    """The embedded target without drafts and without HTTP."""
    return LLM(embedded.NAME)


@pytest.mark.parametrize("body", COMPLETIONS, ids=lambda body: body["model"])
def test_completions_of_the_documents(served: tuple[Running, dict[str, Any]], plain: LLM, body: dict[str, Any]) -> None:
    answer = served[0].post("/v1/completions", body)
    assert answer.status_code == 200
    said = answer.json()
    assert 0 < said["usage"]["completion_tokens"] <= body["max_tokens"]
    again = served[0].post("/v1/completions", {**body, "seed": 3}).json()["choices"][0]
    params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=3)
    expected = plain.generate(body["prompt"], params)[0]
    assert (again["text"], again["finish_reason"]) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize("body", CHATS, ids=lambda body: body["model"])
def test_chats_of_the_documents(served: tuple[Running, dict[str, Any]], plain: LLM, body: dict[str, Any]) -> None:
    answer = served[0].post("/v1/chat/completions", body)
    assert answer.status_code == 200
    said = answer.json()
    assert said["choices"][0]["message"]["role"] == "assistant"
    assert 0 < said["usage"]["completion_tokens"] <= body["max_tokens"]
    again = served[0].post("/v1/chat/completions", {**body, "seed": 3}).json()["choices"][0]
    expected = plain.chat(body["messages"], SamplingParams(max_tokens=body["max_tokens"], temperature=1, seed=3))[0]
    assert again["message"]["content"] == expected.text
    assert expected.text.strip()


def test_server_info_is_the_resolved_configuration(served: tuple[Running, dict[str, Any]]) -> None:
    said = served[0].get("/server_info").json()
    del said["load"]
    assert said.pop("offers")["max_draft_len"] == 5
    assert said.pop("machine")["cores"] >= 1
    assert said == served[1]
    assert said["speculative"]["max_draft_len"] == 5
    assert said["origins"]["draft"].endswith("speculative_config.speculative_model_dir")
    assert len(said["notes"]) == 2
