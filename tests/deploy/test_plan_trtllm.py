"""Plans for TensorRT-LLM beside the files of NVIDIA's documents, and the names that each version has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sametoken import embedded
from sametoken.deploy.plan.engines import ENGINES
from sametoken.deploy.plan.launch import Wanted
from sametoken.dialects.trtllm_yaml import read_file
from sametoken.errors import ConfigError
from sametoken.options.speculation import SpeculativeConfig

PLAYBOOKS = Path(__file__).parents[1] / "playbooks"  # the documents' own files, for the image 1.2.0rc6
# The names in `DecodingBaseConfig.from_dict` of 1.2.0rc6, and those of the classes since 1.3 (`Literal`).
VERSIONS = {
    "1.2": {"MTP", "Medusa", "Eagle", "Lookahead", "NGram", "DraftTarget", "SaveState", "UserProvided", "AUTO"},
    "1.3": {"MTP", "Medusa", "Eagle", "Eagle3", "Lookahead", "NGram", "Draft_Target", "SA", "PARD", "DFlash",
            "SaveState", "User_Provided", "AUTO"},
}  # fmt: skip
RELEASE = "nvcr.io/nvidia/tensorrt-llm/release"


def group(method: str, draft: str | None = None, image: str = "", **more: Any) -> dict[str, Any]:
    """The group speculative_config of a plan."""
    speculative = SpeculativeConfig(method=method, max_draft_len=more.pop("max_draft_len", 4))
    launch = ENGINES["trtllm"](Wanted("org/target", draft, method, speculative, {}, image=image, **more))
    found: dict[str, Any] = yaml.safe_load(launch.files["trtllm.yml"])["speculative_config"]
    return found


@pytest.mark.parametrize("name", ["draft_target", "eagle", "two_nodes"])
def test_a_plan_has_the_words_of_the_document(name: str) -> None:
    stated = yaml.safe_load((PLAYBOOKS / f"{name}.yml").read_text())
    asked = stated["speculative_config"]
    method = "draft_target" if name == "draft_target" else "eagle3"
    assert group(method, asked["speculative_model_dir"], max_draft_len=asked["max_draft_len"]) == asked
    config = ENGINES["trtllm"](Wanted("t", "d", method, SpeculativeConfig(method=method), {})).files["trtllm.yml"]
    assert yaml.safe_load(config)["disable_overlap_scheduler"] == stated["disable_overlap_scheduler"]


@pytest.mark.parametrize(
    ("image", "version", "names"),
    [
        ("", "1.2", ("Eagle", "DraftTarget", "NGram")),
        (f"{RELEASE}:1.2.0rc6", "1.2", ("Eagle", "DraftTarget", "NGram")),
        (f"{RELEASE}:spark-single-gpu-dev", "1.2", ("Eagle", "DraftTarget", "NGram")),
        (f"{RELEASE}:1.3.0rc12", "1.3", ("Eagle3", "Draft_Target", "NGram")),
        ("registry:5000/mine:v2.0", "1.3", ("Eagle3", "Draft_Target", "NGram")),
    ],
)
def test_names_are_those_of_the_image(image: str, version: str, names: tuple[str, ...]) -> None:
    drafts = {"eagle3": "org/head", "draft_target": "org/draft", "ngram": None}
    found = tuple(group(method, draft, image)["decoding_type"] for method, draft in drafts.items())
    assert found == names
    assert set(found) <= VERSIONS[version]


def test_suffix_drafts_need_a_version_that_has_them() -> None:
    assert "SA" not in VERSIONS["1.2"]
    with pytest.raises(ConfigError, match=f"has such drafts since 1.3; give --image {RELEASE}:1.3"):
        group("suffix")
    assert group("suffix", image=f"{RELEASE}:1.3.0rc12")["decoding_type"] == "SA"


def test_the_layers_of_a_head_are_stated(run: Any, tmp_path: Path) -> None:
    said = run("deploy", "plan", "embedded", "--draft", "embedded-eagle3", "--engine", "trtllm", "--out",
               str(tmp_path / "head"), "--image", f"{RELEASE}:1.3.0rc12")  # fmt: skip
    assert said.code == 0, said.err
    file = tmp_path / "trtllm.yml"
    file.write_text(said.out.partition("'END'\n")[2].partition("END\n")[0])
    stated = yaml.safe_load(file.read_text())["speculative_config"]
    config = yaml.safe_load((embedded.HEAD / "config.json").read_text())
    assert stated["eagle3_layers_to_capture"] == config["sametoken"]["taps"]
    assert stated["decoding_type"] == "Eagle3"
    drafts, rest = read_file(str(file))  # sametoken serve takes its own plan
    assert drafts.settings["draft"].value == str(tmp_path / "head")
    assert any("eagle3_layers_to_capture" in note for note in (*drafts.notes, *rest.notes))


def test_the_backend_is_named_once(run: Any) -> None:
    words = ("org/target", "--draft", "org/head", "--method", "eagle3", "--engine", "trtllm")
    for given in ((), ("--backend", "pytorch")):
        said = run("deploy", "plan", *words, *given)
        assert said.out.count("--backend pytorch") == 1
