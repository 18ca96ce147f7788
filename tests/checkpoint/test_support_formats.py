"""Every format of weights with every family: loads, computes what the numbers mean, and any draft changes no token.

Each cell is held against `docs/support_formats.json`, which `make support` writes from these tests and turns into a
page. `make test` runs one cell of each family; SAMETOKEN_WRITE_SUPPORT runs all.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from test_mxfp4_experts import STATED, packed, rewritten
from test_quantised import in_eight_bits, logits
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import sametoken.train
from cli_checks import Answer, speak
from engine_checks import alone, make_llm, prompts, said
from matrix import mark
from quantised_makers import MADE, is_chosen, quantised
from sametoken import SamplingParams
from sametoken.checkpoint.experts import TURNED
from sametoken.checkpoint.hub import resolve
from sametoken.checkpoint.load import load_decoder
from sametoken.errors import ConfigError, UnsupportedModelError
from sametoken.model import families
from sametoken.model.formats.base import WeightFormat
from sametoken.model.formats.names import FORMATS
from tiny_models import FAMILIES as MEMBERS
from tiny_models import UNKNOWN, build

gguf = pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Type  # noqa: E402

from gguf_makers import UNSTATED, write_gguf  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
DOCS = Path(__file__).parents[2] / "docs"
FAMILIES = [name for name in families.FAMILIES if name not in UNKNOWN]
RECORD = DOCS / "support_formats.json"
WRITE = bool(os.environ.get("SAMETOKEN_WRITE_SUPPORT"))

GGUF_TYPES = (
    Type.Q8_0, Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.MXFP4, Type.Q4_1,
    Type.Q5_0, Type.Q5_1, Type.IQ4_NL, Type.IQ4_XS, Type.Q2_K, Type.Q3_K, Type.NVFP4, Type.IQ1_S, Type.IQ1_M,
    Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.TQ1_0, Type.TQ2_0,
)  # fmt: skip
ON_LOAD = {"int8": ("int8", "int8_weight_only"), "int4": ("int4", "int4_g128")}


def made(*starts: str) -> tuple[str, ...]:
    return tuple(name for name in MADE if name.partition("-")[0] in starts)


# The columns of the page, and the variants of each.
COLUMNS: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16",), "FP8": made("fp8"), "NVFP4": made("nvfp4"), "MXFP4": made("mxfp4"), "AWQ": made("awq"),
    "GPTQ": made("gptq"), "W4A16": made("w4a16"), "W8A16": made("w8a16"), "W8A8": made("w8a8"),
    "GGUF": tuple(kind.name for kind in GGUF_TYPES), **ON_LOAD,
}  # fmt: skip
# What `sametoken quantize` writes in a column's format; GGUF files need a published tokenizer, see tests/quantise.
WRITTEN = {"FP8": "fp8", "NVFP4": "nvfp4", "MXFP4": "mxfp4", "W4A16": "int4", "W8A8": "int8"}
# Sizes that every format's groups and blocks divide; those of GGUF's K types are 256 numbers.
WIDTH = {"GGUF": 256}
PREFERRED = {"Phi3ForCausalLM": "phi-3-long"}
REQUESTS = [
    (prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=8, ignore_eos=True))
    for i, prompt in enumerate(prompts(3))
    for temperature in (0.0, 0.8)
]
# Where rows are rounded to eight bits, the last bit of a float may round a number to the next one, and with experts
# others may be chosen, whose rows the oracle does not round.
NEAR, NEAR_EXPERTS = 0.05, 0.1
NOT_ROUNDED = ("kv_b_proj", ".gate", "_gate", "router")  # linears that are no product of a format


def members() -> dict[str, str]:
    """The tiny model of each architecture."""
    found: dict[str, str] = {}
    for name, (config, *_, vision) in MEMBERS.items():
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if vision is None else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        found.setdefault(known[config.model_type], name)
    return {architecture: PREFERRED.get(architecture, found[architecture]) for architecture in FAMILIES}


TINY = members()
CELLS = [(architecture, column) for architecture in FAMILIES for column in COLUMNS]
FEW = [(architecture, list(COLUMNS)[i % len(COLUMNS)]) for i, architecture in enumerate(FAMILIES)]
QUICK = FEW[: len(COLUMNS)]  # each format once; `make test-thorough` has each family too


class Source(NamedTuple):
    """A tiny checkpoint on disk, a head for it, and whether its file holds experts in one tensor."""

    directory: Path
    head: Path
    joined_experts: bool


class Variant(NamedTuple):
    """A model in a format, and the transformers model of the numbers that it means."""

    target: Path
    oracle: PreTrainedModel
    quantization: str = "none"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The source of an architecture at a width, made once."""

    @cache
    def source(architecture: str, width: int) -> Source:
        place = tmp_path_factory.mktemp("source")
        model = wide(TINY[architecture], width, UNSTATED.get(TINY[architecture], {}) if width == 256 else {})
        model.save_pretrained(place / "model")
        speak(place / "model")
        joined = any(is_joined(*each) for each in load_file(place / "model" / "model.safetensors").items())
        sametoken.train.convert(model, [("eagle1", {"eagle_num_layers": 1})])
        model.save_pretrained(place / "converted")
        return Source(place / "model", place / "converted" / "head", joined)

    return source


def is_joined(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the weights of all experts."""
    return tensor.dim() == 3 and ".experts." in name


def wide(name: str, width: int, changes: dict[str, Any]) -> PreTrainedModel:
    """A tiny member with sizes that blocks divide, in bfloat16's numbers."""
    heads = 16 if width == 256 or name.startswith("phi") else 8
    sizes = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": heads, "num_key_value_heads": 4}
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"):
        if key in MEMBERS[name].options:
            sizes[key] = width
    if "kv_lora_rank" in MEMBERS[name].options:  # latent attention has a key for every query
        sizes |= {"num_key_value_heads": heads, "kv_lora_rank": width, "q_lora_rank": width, "qk_rope_head_dim": 32}
    if name.startswith("phi"):
        sizes["hidden_size"] = 256  # heads of 16, for which their rotation has divisors
    model = build(name, **{**sizes, "initializer_range": 0.1, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def variant(source: Source, architecture: str, name: str, column: str, place: Path) -> Variant:
    """A source in a format."""
    if column == "GGUF":
        file = place / f"{name}.gguf"
        model = wide(TINY[architecture], 256, UNSTATED.get(TINY[architecture], {}))
        return Variant(file, write_gguf(file, model, lambda _: Type[name]).eval())
    if column in ON_LOAD:
        return Variant(source.directory, rounded(plain_model(source.directory), FORMATS[name]), name)
    if column == "bf16":
        plain_model(source.directory).bfloat16().save_pretrained(place / name)
        speak(place / name)
        return Variant(place / name, plain_model(place / name))
    if column == "MXFP4" and architecture == "GptOssForCausalLM":
        return gpt_oss(source, place)
    directory = quantised(source.directory, name, place / name, place / f"{name}-meant")
    oracle = plain_model(place / f"{name}-meant")
    if column == "W8A8":
        for path, module in oracle.named_modules():
            read = isinstance(module, torch.nn.Linear) and not path.endswith("kv_b_proj")  # which is no product here
            if read and is_chosen(f"{path}.weight", module.weight):
                module.register_forward_pre_hook(in_eight_bits)
    return Variant(directory, oracle)


def rounded(oracle: PreTrainedModel, form: WeightFormat) -> PreTrainedModel:
    """The oracle with the weights that a format makes of its own, and rows in eight bits where the format has them."""

    def meant(weight: torch.Tensor) -> torch.Tensor:
        return form.dequantize(form.quantise(weight), weight.shape[1])

    turned = oracle.config.get_text_config().model_type in TURNED
    for path, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and not path.endswith(NOT_ROUNDED) and "vision" not in path:
            module.weight = torch.nn.Parameter(meant(module.weight.detach()), requires_grad=False)
            if form.name != "int8_weight_only":
                module.register_forward_pre_hook(in_eight_bits)
        for _, weights in module.named_parameters(recurse=False):
            if weights.dim() == 3 and path.endswith("experts"):
                for expert in weights.data.mT if turned else weights.data:
                    expert.copy_(meant(expert))
    return oracle


def gpt_oss(source: Source, place: Path) -> Variant:
    """Experts in blocks and scales, as gpt-oss is published, and what transformers' own code reads there."""
    stored, meant = {}, {}
    for name, tensor in load_file(source.directory / "model.safetensors").items():
        if is_joined(name, tensor):
            parts = packed(tensor)
            stored |= {f"{name}_{kind}": part for kind, part in parts.items()}
            meant[name] = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)
        else:
            stored[name] = meant[name] = tensor
    directory = rewritten(source.directory, place / "packed", stored, STATED)
    return Variant(directory, plain_model(rewritten(source.directory, place / "plain", meant, None)))


def plain_model(directory: Path) -> PreTrainedModel:
    config = json.loads((directory / "config.json").read_text())
    images = config["architectures"][0].endswith("ForConditionalGeneration")
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def check_equal(found: Variant, column: str, limit: int | None) -> None:
    """Logits in float32 are those of transformers with the numbers that the file means."""
    decoder = load_decoder(resolve(str(found.target)), torch.float32, "cpu", limit, found.quantization)
    tokens = torch.randint(4, 96, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = found.oracle(input_ids=tokens.unsqueeze(0)).logits[0]
        apart = (logits(decoder, tokens, (25, 15)) - expected).norm() / expected.norm()
    rounds = column == "W8A8" or (column in ON_LOAD and found.quantization != "int8_weight_only")
    near = NEAR if decoder.config.experts is None else NEAR_EXPERTS
    assert apart <= (near if rounds else 1e-4)


def check_drafts(target: Path, drafts: list[Path], limit: int | None, quantization: str = "none") -> None:
    """In bfloat16, as it is served: tokens and text with any draft are those of plain decoding."""
    options = {"dtype": "bfloat16", "max_seq_len": limit or 96, "quantization": quantization}
    llm = make_llm(str(target), **options)
    expected = [said(alone(llm, *asked)) for asked in REQUESTS]
    for draft in drafts:
        llm = make_llm(str(target), str(draft), **options)
        got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
        assert [said(each) for each in got] == expected
        assert all(each.speculation.drafted_by.get(llm.method, 0) > 0 for each in got)


def reason(error: str) -> str:
    """What a refusal says first, without the place and name of a file."""
    (line,) = error.strip().splitlines()[-1:]
    said_first = re.sub(r"/\S*/", "", line.removeprefix("error: ")).partition("; ")[0]
    return re.sub(r"^(model|\S+\.gguf): ", "", said_first)


def export(run: Any, source: Source, column: str, place: Path, limit: int | None) -> str | None:
    """What `sametoken quantize` writes is served with a draft as without; why it does not, otherwise."""
    if column not in WRITTEN:
        return None
    few = ("--calibration-tokens=64", "--held-out-tokens=32")
    done: Answer = run(
        "quantize", str(source.directory), f"--format={WRITTEN[column]}", f"--output={place / 'written'}", *few
    )
    if done.code:
        return reason(done.err)
    check_drafts(place / "written", [place / "written"], limit)
    return "yes"


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def record(architecture: str, column: str, cell: dict[str, Any]) -> None:
    """Puts a cell into the record, in the order of the matrix."""
    known = recorded()
    known.setdefault(architecture, {})[column] = cell
    ordered = {name: {c: known[name][c] for c in COLUMNS if c in known[name]} for name in FAMILIES if name in known}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("architecture", "column"), CELLS if WRITE else [pytest.param(*cell, marks=mark(cell in QUICK)) for cell in FEW]
)
def test_format(
    architecture: str, column: str, sources: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sametoken.checkpoint.hub.opened_directory", lambda: tmp_path / "opened")
    source, limit = sources(architecture, WIDTH.get(column, 128)), MEMBERS[TINY[architecture]].max_seq_len
    cell: dict[str, Any] = {"equal": [], "refused": {}, "drafts": [], "written": None, "experts": ""}
    for name in COLUMNS[column]:
        try:
            found = variant(source, architecture, name, column, tmp_path)
            check_equal(found, column, limit)
        except (UnsupportedModelError, ConfigError) as error:
            cell["refused"][name] = reason(str(error))
            continue
        cell["equal"].append(name)
        if not cell["drafts"]:
            check_drafts(found.target, [found.target, source.head], limit, found.quantization)
            cell["drafts"] = ["draft model", "EAGLE-1"]
    own = ("MXFP4",) if architecture == "GptOssForCausalLM" else ()
    if source.joined_experts and column not in ("bf16", "GGUF", *own, *ON_LOAD):
        cell["experts"] = "plain"
    if WRITE:
        cell["written"] = export(run, source, column, tmp_path, limit)
        record(architecture, column, cell)
    else:
        cell["written"] = recorded()[architecture][column]["written"]  # tests/quantise writes what it takes seconds for
    assert recorded()[architecture][column] == cell, "run `make support`"


def test_the_record_has_every_cell() -> None:
    assert {name: list(row) for name, row in recorded().items()} == {name: list(COLUMNS) for name in FAMILIES}


def test_every_variant_that_is_read_is_in_a_column() -> None:
    assert sorted(name for column in COLUMNS.values() for name in column if name in MADE) == sorted(MADE)
