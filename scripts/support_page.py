"""Writes docs/support.md from the records of the support matrices' tests, docs/support*.json: `make support`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sametoken.checkpoint.gguf.write import ARCHITECTURES

DOCS = Path(__file__).parents[1] / "docs"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "speculators": "speculators"}

GGUF_WRITTEN = [f"`{name}`" for name in ARCHITECTURES]  # tests/quantise
# What a column of the first table is, as (files, equal to, measured speed); `make support` writes the rest.
KERNELS = "[a product](checkpoints.md#speed-on-a-cpu)"
FORMATS = {
    "bf16": ("plain safetensors", "transformers", "[engines](benchmarks.md#peers-side-by-side)"),
    "FP8": ("Model-Optimizer, compressed-tensors, Qwen and DeepSeek blocks, FBGEMM", "transformers", KERNELS),
    "NVFP4": ("Model-Optimizer, compressed-tensors", "transformers", KERNELS),
    "MXFP4": ("compressed-tensors; gpt-oss as published", "transformers", KERNELS),
    "AWQ": ("AutoAWQ's gemm", "transformers", KERNELS),
    "GPTQ": ("4 and 8 bits, `desc_act`, version 2", "transformers", "not measured"),
    "W4A16": ("compressed-tensors", "transformers", KERNELS),
    "W8A16": ("compressed-tensors", "transformers", KERNELS),
    "W8A8": ("compressed-tensors", "transformers that rounds rows too", "not measured"),
    "GGUF": ("llama.cpp", "transformers", KERNELS),
    "int8": (
        "plain safetensors, `--quantization int8`",
        "transformers with the rounded numbers",
        "[engines](benchmarks.md#peers-side-by-side)",
    ),
    "int4": (
        "plain safetensors, `--quantization int4`",
        "transformers with the rounded numbers",
        "[engines](benchmarks.md#peers-side-by-side)",
    ),
}
SUFFIXES = {"ForCausalLM": "", "ForConditionalGeneration": ", text of a model with images"}
ALTERED = (
    "experts are not quantised: this family's files keep all experts in one tensor, and these tools' layouts have no "
    "form for that"
)

HEAD = """\
# Support

Written by `make support` from what tests found; the tests check that it still holds. Tiny random models on a CPU.

## Families and weight formats

`tests/checkpoint/test_support_formats.py`. A row is an architecture of `config.json`, a column a format of weights.

| family | {columns} | published file loaded |
|---|{rules}|---|
"""

LEGEND = """
- **yes**: files of every variant of the format (below) were loaded; logits in float32 equal those of
  transformers with the numbers that the file stands for. The prompt is longer than the family's windows and is read in
  pieces. In bfloat16, as it is served, tokens and text with a draft model and with an EAGLE-1 head are those of plain
  decoding, at temperatures 0 and 0.8.
- **write**: the same, and what `sametoken quantize` writes in this format is served alike.
- **published file loaded**: what `make support PUBLISHED='FILE.gguf ...'` loaded and went on with, greedily, plain and
  with drafts alike:

{published}
- A number is a note:

{notes}

## Formats

| format | files | variants | logits equal to | drafts tried | `quantize` writes | speed |
|---|---|---|---|---|---|---|
"""

HEADS = """
Logits differ by less than 1e-4 of their norm. Weights that are rounded on load are compared with transformers on the
rounded numbers. Where activations are rounded to eight bits (W8A8, int8, int4), transformers rounds them too, but a
difference in the last bit can give the next code: the limit is 0.05 of the norm. With experts it is 0.1, because only
we round their activations, so other experts may be chosen. What a stored weight means is compared bit for bit in
`tests/checkpoint`, and with the other tools' own readers in `make conformance`. Speed says where a
product or a step of the format was measured; these tiny models say nothing of it. GGUF files were written with what
they can state: no window for Mistral and Mixtral, and for SmolLM 3 its usual layers without rotation.

## Families and heads

`tests/model/test_support_matrix.py`.

| family | {columns} |
|---|{rules}|
"""

BODY = """
**yes** means that all of this was done with a tiny model of the family in float32:

| step | what happened |
|---|---|
| converts | `sametoken.train.convert` gave a transformers model the head; only the head learned from a batch; \
it was saved |
| trains | `sametoken train` made three steps from conversations; the target's files stayed as they were |
| exports | `sametoken export` wrote the head for every engine that computes it, and named the engine where \
none was written |
| reloads | every exported directory was the trained head again, bit for bit, with its own rotation |
| serves | with the exported head an engine said what plain decoding says: token ids, text and log-probabilities, \
at temperatures 0 and 0.8, with a chain and with a tree of guesses (EAGLE-2's; Medusa's by `evaluate --write-tree`) |

The tiny models have what is special about a family: scaled rotations (Llama 3.1, Phi 3, Qwen 2.5), sliding windows
(Mistral, Phi 3), fused projections (Phi 3), biases (Qwen 1.5, 2, 2.5), tied token vectors (Qwen 2, Qwen 3), norms of
queries and keys (Qwen 3), norms after attention and MLP (Gemma, OLMo, GLM 4), capped scores (Gemma 2), two rotations
(Gemma 3, OLMo 3), multipliers (Granite 3, Gemma), layers without rotation (SmolLM 3, Llama 4), interleaved rotation
(GLM 4, Llama 4), experts (Mixtral, Qwen 2 and 3 MoE, gpt-oss), chosen by sigmoids from groups (GLM 4.5, DeepSeek V3),
whose inputs have weights (Llama 4), sinks (gpt-oss), attention in chunks (Llama 4), latent attention (DeepSeek). A head
has none of this unless it is asked for: it is a Llama block with a rotation of its own.

## Engines

For which engines a head with default settings is exported ([what each refuses](training.md#export)):

| head | {engines} |
|---|{engine_rules}|
"""

END = """
## What is not claimed

- **NeMo and Megatron-LM.** NVIDIA's matrix of the same families has a second table for them. Nothing here trains inside
  them, reads their checkpoints or splits a target by tensor, pipeline or context; a model of theirs is one here once it
  is a Hugging Face checkpoint.
- **Acceptance and speed.** A random model shows that the numbers are right, not that a head is worth its time: that is
  what `sametoken evaluate` and `sametoken bench` measure on the model in question.
- **Other engines' numbers.** The columns of engines say that their loaders' rules are met, not that they were run.
- **Further families**, images and sound: a model of an unknown architecture is refused by name.
"""


Record = Mapping[str, Mapping[str, Mapping[str, Any]]]


Published = Mapping[str, Mapping[str, str]]


def page(record: Record, formats: Record, published: Published) -> str:
    """The page.

    Args:
        record: of each family and kind of head, whether each step was done, and `engines` it was exported for.
        formats: of each architecture and format, what was `equal`, `refused` (with its reason) and `written`, the
            `drafts` that were tried, and whether `experts` stayed "plain".
        published: of each file its `architecture`, `sha256` and the `date` on which it was loaded.
    """
    kinds = list(next(iter(record.values())))
    text = _formats(formats, published)
    text += HEADS.format(columns=" | ".join(kinds), rules="---|" * (len(kinds) - 1) + "---")
    for family, cells in record.items():
        text += f"| {family} | {' | '.join(_word(cells[kind]) for kind in kinds)} |\n"
    text += BODY.format(engines=" | ".join(ENGINES.values()), engine_rules="---|" * (len(ENGINES) - 1) + "---")
    for kind in kinds:
        everywhere = set(ENGINES).intersection(*(cells[kind]["engines"] for cells in record.values()))
        text += f"| {kind} | {' | '.join('yes' if engine in everywhere else 'no' for engine in ENGINES)} |\n"
    return text + END


def _formats(formats: Record, published: Published) -> str:
    """Both tables of formats."""
    columns, notes = list(next(iter(formats.values()))), dict[str, int]()
    text = HEAD.format(columns=" | ".join(columns), rules="---|" * (len(columns) - 1) + "---")
    for architecture, cells in formats.items():
        words = [_format_word(cells[column], notes) for column in columns]
        dates = [file["date"] for file in published.values() if file["architecture"] == architecture]
        words.append(max(dates, default=""))
        text += f"| {_family(architecture)} | {' | '.join(words)} |\n"
    files = "\n".join(
        f"  - `{name}` ({_family(file['architecture'])}), {file['date']}, SHA-256 `{file['sha256']}`"
        for name, file in published.items()
    )
    lines = [f"  {number}. {words}" for words, number in notes.items()]
    text += LEGEND.format(published=files, notes="\n".join(lines) or "  (none)")
    for column in columns:
        cells = [row[column] for row in formats.values()]
        files, equal, speed = FORMATS[column]
        variants = list(dict.fromkeys(name for cell in cells for name in cell["equal"]))
        drafts = list(dict.fromkeys(draft for cell in cells for draft in cell["drafts"]))
        written = sum(cell["written"] == "yes" for cell in cells)
        count = f"{written} families" if written else ", ".join(GGUF_WRITTEN) if column == "GGUF" else "no"
        text += f"| {column} | {files} | {', '.join(variants)} | {equal} | {', '.join(drafts)} | {count} | {speed} |\n"
    return text


def _family(architecture: str) -> str:
    suffix = next(each for each in SUFFIXES if architecture.endswith(each))
    return architecture.removesuffix(suffix) + SUFFIXES[suffix]


def _format_word(cell: Mapping[str, Any], notes: dict[str, int]) -> str:
    """What a cell says, with the numbers of its notes, which are added."""
    reasons = list(dict.fromkeys(cell["refused"].values())) + ([ALTERED] if cell["experts"] == "plain" else [])
    found = "no" if not cell["equal"] else "some" if cell["refused"] else "write" if cell["written"] == "yes" else "yes"
    numbers = [notes.setdefault(reason, len(notes) + 1) for reason in reasons]
    return found + (f" ({', '.join(map(str, numbers))})" if numbers else "")


def _word(cell: Mapping[str, Any]) -> str:
    """Whether all was done, or the first step that was not."""
    missing = [step for step, done in cell.items() if done is False]
    return f"no: {missing[0]}" if missing else "yes"


if __name__ == "__main__":
    records = [
        json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("support", "support_formats", "support_published")
    ]
    (DOCS / "support.md").write_text(page(*records), encoding="utf-8")
