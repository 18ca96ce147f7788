"""Writes docs/support.md from docs/support.json, which the tests of the support matrix write: `make support`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "speculators": "speculators"}

HEAD = """\
# Support

Written by `make support` from what `tests/model/test_support_matrix.py` found; the tests check that it still holds.

| family | {columns} |
|---|{rules}|
"""

BODY = """
**yes** means that all of this was done with a tiny random model of the family, on a CPU, in float32:

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
(Gemma 3, OLMo 3), multipliers (Granite 3, Gemma), layers without rotation (SmolLM 3), interleaved rotation (GLM 4),
experts (Mixtral, Qwen 2 and 3 MoE, gpt-oss), chosen by sigmoids from groups (GLM 4.5), sinks (gpt-oss). A
head has none of this unless it is asked for: it is a Llama block with a rotation of its own.

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


def page(record: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The page.

    Args:
        record: of each family and kind of head, whether each step was done, and `engines` it was exported for.
    """
    kinds = list(next(iter(record.values())))
    text = HEAD.format(columns=" | ".join(kinds), rules="---|" * (len(kinds) - 1) + "---")
    for family, cells in record.items():
        text += f"| {family} | {' | '.join(_word(cells[kind]) for kind in kinds)} |\n"
    text += BODY.format(engines=" | ".join(ENGINES.values()), engine_rules="---|" * (len(ENGINES) - 1) + "---")
    for kind in kinds:
        everywhere = set(ENGINES).intersection(*(cells[kind]["engines"] for cells in record.values()))
        text += f"| {kind} | {' | '.join('yes' if engine in everywhere else 'no' for engine in ENGINES)} |\n"
    return text + END


def _word(cell: Mapping[str, Any]) -> str:
    """Whether all was done, or the first step that was not."""
    missing = [step for step, done in cell.items() if done is False]
    return f"no: {missing[0]}" if missing else "yes"


if __name__ == "__main__":
    record = json.loads((DOCS / "support.json").read_text(encoding="utf-8"))
    (DOCS / "support.md").write_text(page(record), encoding="utf-8")
