"""Model names into directories: a Hub stand-in answers, breaks off, refuses and vanishes; every refusal is in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_server import Hub, Repository, serve
from sametoken import LLM, SamplingParams
from sametoken.checkpoint import hub as room
from sametoken.errors import CheckpointError, DraftMismatchError, HubError, SametokenError, UnsupportedModelError

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()
WEIGHTS = bytes(range(256)) * 4096
SINGLE = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"words"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one small repository, the client pointed at it with an empty cache and without waiting."""
    from huggingface_hub import constants, file_download

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serve(Hub({"owner/small": Repository(dict(SINGLE))})) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
        yield server


def names(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def refused(model: str, **options: object) -> str:
    with pytest.raises(HubError) as caught:
        room.resolve(model, quiet=True, **options)
    return str(caught.value)


def test_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert room.resolve(str(tmp_path)) == tmp_path


def test_a_directory_with_one_gguf_file_stands_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_opened", lambda file: tmp_path / "opened" / file.name)
    (tmp_path / "model-q8_0.gguf").touch()
    assert room.resolve(tmp_path) == tmp_path / "opened" / "model-q8_0.gguf"
    (tmp_path / "other.gguf").touch()
    assert room.resolve(tmp_path) == tmp_path, "which one is meant is not known"
    (tmp_path / "other.gguf").unlink()
    (tmp_path / "config.json").touch()
    assert room.resolve(tmp_path) == tmp_path


def test_download_brings_what_is_needed_and_is_not_repeated(hub: Hub) -> None:
    directory = room.resolve("owner/small", quiet=True)
    assert names(directory) == set(SINGLE) - {"README.md"}
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert room.resolve("owner/small", quiet=True) == directory
    assert hub.fetched("model.safetensors") == [None]


def test_other_layouts_of_the_weights_are_left_out(hub: Hub) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": WEIGHTS[:i] for i in (1, 2)}
    index = {"model.safetensors.index.json": b'{"weight_map": {}}'}
    copies = {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x", "original/model.safetensors": b"x"}
    tokenizer = {"tokenizer.model": b"t", "chat_template.jinja": b"c", "generation_config.json": b"{}"}
    wanted = {"config.json": CONFIG, **shards, **index, **tokenizer}
    hub.repositories["owner/sharded"] = Repository({**wanted, **copies})
    assert names(room.resolve("owner/sharded", quiet=True)) == set(wanted)


def test_the_kind_of_a_gguf_file_after_a_colon_brings_that_file_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from gguf import GGMLQuantizationType as Type

    from gguf_makers import embedded_gguf

    monkeypatch.setattr(room, "opened_directory", lambda: tmp_path / "opened")
    file, _ = embedded_gguf(tmp_path, "embedded", Type.Q8_0)
    files = {"tiny-Q8_0.gguf": file.read_bytes(), "tiny-F16.gguf": WEIGHTS, "README.md": b"words"}
    hub.repositories["owner/tiny-GGUF"] = Repository(files)
    directory = room.resolve("owner/tiny-GGUF:Q8_0", quiet=True)
    assert directory.name.startswith("tiny-Q8_0-")
    assert {path.rpartition("/")[2] for path in weights_asked(hub)} == {"tiny-Q8_0.gguf"}
    greedy = SamplingParams(temperature=0, max_tokens=16)
    named, by_path = (LLM(name).generate("Once upon a time", greedy) for name in ("owner/tiny-GGUF:Q8_0", str(file)))
    assert named[0].token_ids == by_path[0].token_ids
    hub.down = True
    assert room.resolve("owner/tiny-GGUF:q8_0", offline=True, quiet=True) == directory
    hub.down = False
    assert "it has F16, Q8_0" in refused("owner/tiny-GGUF:Q4_K_M")
    assert room.resolve("owner/tiny-GGUF", quiet=True) == directory, "Q4_K_M is not there, Q8_0 comes next"


def weights_asked(hub: Hub) -> list[str]:
    """Every request of a file of weights."""
    return [path for _, path, _ in hub.requests if path.endswith((".safetensors", ".bin", ".gguf"))]


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 98, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip


def published(tokenizer: Path, **changes: object) -> Repository:
    """A repository whose configuration and tokenizer can be read, with weights that are none."""
    files = {file.name: file.read_bytes() for file in tokenizer.iterdir() if not file.name.endswith(".safetensors")}
    return Repository({**files, "config.json": json.dumps({**TINY, **changes}).encode(), "model.safetensors": WEIGHTS})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["PhimoeForCausalLM"], "num_experts": 128}, "mixture of experts with other parts"),
        ({"quantization_config": {"quant_method": "hqq"}}, "HQQ"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"architectures": None}, "'architectures'"),
        ({"hidden_size": 1 << 20, "head_dim": 1 << 10, "num_hidden_layers": 1000}, "GB are free"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "holds a head"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_loaded_is_refused_before_its_weights_are_fetched(
    hub: Hub, changes: dict[str, object], words: str, tiny_llm_dir: Path
) -> None:
    hub.repositories["owner/other"] = published(tiny_llm_dir, **changes)
    with pytest.raises(SametokenError, match=words):
        LLM("owner/other")
    assert weights_asked(hub) == []


def test_a_tokenizer_that_cannot_be_read_costs_no_download(hub: Hub, tiny_llm_dir: Path) -> None:
    repository = published(tiny_llm_dir)
    del repository.files["tokenizer.json"]
    hub.repositories["owner/other"] = repository
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM("owner/other")
    assert weights_asked(hub) == []


def test_a_draft_of_another_vocabulary_costs_no_download(hub: Hub, tiny_llm_dir: Path) -> None:
    repository = published(tiny_llm_dir)
    hub.repositories["owner/draft"] = repository
    repository.files["tokenizer.json"] = repository.files["tokenizer.json"].replace(b'"q"', b'"Q2"')
    with pytest.raises(DraftMismatchError, match="another vocabulary"):
        LLM(str(tiny_llm_dir), "owner/draft")
    repository.files |= {"config.json": json.dumps({**TINY, "architectures": ["OlmoeForCausalLM"]}).encode()}
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        LLM(str(tiny_llm_dir), "owner/draft")
    assert weights_asked(hub) == []


def test_weights_larger_than_the_disk_are_not_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["owner/small"].claims["model.safetensors"] = 10**18
    message = refused("owner/small")
    assert "the weights of owner/small take 1000000000.0 GB, and" in message
    assert f"free in {tmp_path / 'cache'}; make room, or set HF_HOME" in message
    assert weights_asked(hub) == []


def test_what_is_on_the_disk_already_needs_no_space(hub: Hub, tiny_llm_dir: Path) -> None:
    called = []
    directory = room.resolve("owner/small", quiet=True, check=called.append)
    assert called == [directory]
    hub.repositories["owner/small"].claims["model.safetensors"] = 10**18
    assert room.resolve("owner/small", quiet=True, check=called.append) == directory
    assert called == [directory]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}, "has no weights .* a LoRA adapter"),
        ({"model.safetensors": WEIGHTS, "README.md": b""}, "has no config.json: .*weights without"),
        ({"train.parquet": WEIGHTS}, "a data set"),
        ({"README.md": b""}, "found README.md; expected a Hugging Face checkpoint"),
    ],
)
def test_repositories_that_are_no_checkpoint(hub: Hub, files: dict[str, bytes], words: str) -> None:
    hub.repositories["owner/other"] = Repository(files)
    with pytest.raises(CheckpointError, match=words):
        room.resolve("owner/other", quiet=True)
    assert weights_asked(hub) == []


def test_a_tokenizer_of_another_repository_brings_no_weights(hub: Hub, tiny_llm_dir: Path) -> None:
    hub.repositories["owner/other"] = published(tiny_llm_dir)
    LLM(str(tiny_llm_dir), tokenizer="owner/other")
    assert weights_asked(hub) == []


def test_bin_files_are_fetched_when_there_is_no_safetensors(hub: Hub) -> None:
    wanted = {"config.json": CONFIG, "pytorch_model.bin": WEIGHTS}
    hub.repositories["owner/old"] = Repository({**wanted, "training_args.bin": b"x"})
    assert names(room.resolve("owner/old", quiet=True)) == set(wanted)


def test_broken_transfer_is_resumed_where_it_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # what is kept of a broken transfer: whole chunks
    hub.repositories["owner/small"].breaks["model.safetensors"] = 1
    directory = room.resolve("owner/small", quiet=True)
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    first, second = hub.fetched("model.safetensors")
    assert first is None
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").rstrip("-")) < len(WEIGHTS)


def test_half_downloaded_repository_is_named_offline_and_completed_online(hub: Hub) -> None:
    directory = room.resolve("owner/small", quiet=True)
    (directory / "model.safetensors").unlink()
    assert "half downloaded" in refused("owner/small", offline=True)
    assert names(room.resolve("owner/small", quiet=True)) == set(SINGLE) - {"README.md"}


def test_cache_serves_offline_and_when_the_hub_is_down(hub: Hub) -> None:
    directory = room.resolve("owner/small", quiet=True)
    asked = len(hub.requests)
    assert room.resolve("owner/small", offline=True) == directory
    assert len(hub.requests) == asked
    hub.down = True
    assert room.resolve("owner/small", quiet=True) == directory


def test_offline_without_cache_says_how_to_fill_it(hub: Hub) -> None:
    message = refused("owner/small", offline=True)
    assert "offline" in message
    assert "run once without HF_HUB_OFFLINE" in message
    assert hub.requests == []


def test_no_connection_without_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    message = refused("owner/small")
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert "HF_ENDPOINT" in message


def test_server_error_without_cache(hub: Hub) -> None:
    hub.down = True
    assert "the Hub answered 503" in refused("owner/small")


def test_unknown_repository_says_that_both_were_tried_and_what_is_near(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "smell").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    message = refused("owner/smelt")
    assert "neither a directory here (nearest: owner/smell) nor a repository" in message
    assert hub.url in message


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("embeded", "(did you mean 'embedded', which sametoken has?)"),
        ("embeded-eagle3", "(did you mean 'embedded-eagle3', which sametoken has?)"),
        ("embedded-eagle3", "give it as --draft"),
    ],
)
def test_a_mistyped_name_of_the_packages_models(hub: Hub, model: str, hint: str) -> None:
    assert hint in refused(model)


def test_unknown_revision(hub: Hub) -> None:
    assert "has no revision 'v9'" in refused("owner/small", revision="v9")


@pytest.mark.parametrize("token", [None, "stranger"])
def test_gated_repository_asks_for_access(hub: Hub, token: str | None) -> None:
    hub.valid_tokens = frozenset({"stranger", "friend"})
    hub.repositories["owner/closed"] = Repository(dict(SINGLE), gated=True, granted=frozenset({"friend"}))
    message = refused("owner/closed", token=token)
    assert f"visit {hub.url}/owner/closed" in message
    assert "HF_TOKEN" in message
    assert names(room.resolve("owner/closed", token="friend", quiet=True)) == set(SINGLE) - {"README.md"}


def test_bad_token(hub: Hub) -> None:
    assert "refused the token" in refused("owner/small", token="forged")


def test_token_of_the_environment_opens_a_private_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.valid_tokens = frozenset({"friend"})
    hub.repositories["owner/private"] = Repository(dict(SINGLE), private=True, granted=frozenset({"friend"}))
    assert "set HF_TOKEN if it is private" in refused("owner/private")
    monkeypatch.setenv("HF_TOKEN", "friend")
    assert (room.resolve("owner/private", quiet=True) / "model.safetensors").read_bytes() == WEIGHTS


def test_environment_variables_reach_the_client(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are read by the client at import: seen from a fresh process."""
    code = "from sametoken.checkpoint.hub import resolve; print(resolve('owner/small'))"

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
        path = os.pathsep.join(sys.path)
        return subprocess.run(
            [sys.executable, "-c", code], env={**home, "PYTHONPATH": path, **more}, capture_output=True, text=True
        )

    assert "offline mode" in run(HF_HUB_OFFLINE="1").stderr
    online = run()
    assert names(Path(online.stdout.strip())) == set(SINGLE) - {"README.md"}
    assert run(HF_HUB_OFFLINE="1").stdout == online.stdout


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_on_stderr_unless_quiet(
    hub: Hub, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # shows progress where there is no terminal
    room.resolve("owner/small", quiet=quiet)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (shown.err == "") == quiet


@pytest.mark.parametrize("model", ["./models/tinny", "/nowhere/at/all", "a/b/c", "~/absent-model"])
def test_what_is_written_as_a_path_never_asks_the_hub(
    model: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no directory") as caught:
        room.resolve(model)
    assert ("nearest: models/tiny" in str(caught.value)) == (model == "./models/tinny")
    assert hub.requests == []


def test_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"ONNX")
    with pytest.raises(CheckpointError, match="is a file, expected a directory"):
        room.resolve(str(tmp_path / "model.onnx"))


def test_pipe_instead_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="is neither a file nor a directory"):
        room.resolve(str(tmp_path / "model.gguf"))


def test_unreadable_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        room.resolve(str(tmp_path / ("x" * 300)))


def test_config_of_a_causal_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    assert room.read_config(tmp_path) == json.loads(CONFIG)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, CheckpointError, "no config.json"),
        ('{"model_type": ', CheckpointError, "is not JSON"),
        ("[1, 2]", CheckpointError, "holds a list"),
        ('{"architectures": ["BertForMaskedLM"]}', UnsupportedModelError, "BertForMaskedLM"),
        ('{"architectures": "LlamaForCausalLM"}', CheckpointError, "expected a list"),
    ],
)
def test_config_that_is_none(tmp_path: Path, content: str | None, error: type[Exception], words: str) -> None:
    (tmp_path / "weights.txt").touch()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=words):
        room.read_config(tmp_path)


def test_config_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        room.read_config(tmp_path)


def test_config_of_an_absent_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        room.read_config(tmp_path / "absent")
