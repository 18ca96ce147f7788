"""Record of Medusa heads."""

from __future__ import annotations

from sametoken.kinds import Kind

KIND = Kind(
    name="medusa",
    title="Medusa",
    what="Medusa heads",
    drafts="sametoken.heads.medusa.drafts:Medusa",
    weights="head",
    objective="sametoken.heads.medusa.training:TRAINING",
    marks=("medusa", "medusa_num_heads"),
    words=("Medusa",),
    aliases={"vllm": ("medusa",), "trtllm": ("Medusa",), "train": ("medusa",)},
)
