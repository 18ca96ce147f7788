"""Record of EAGLE-1 heads, which EAGLE-2 uses with trees of another shape."""

from __future__ import annotations

from sametoken.kinds import Kind

KIND = Kind(
    name="eagle",
    title="EAGLE-1",
    what="an EAGLE-1 or EAGLE-2 head",
    drafts="sametoken.heads.eagle1.drafts:Eagle1",
    weights="head",
    objective="sametoken.heads.eagle1.training:TRAINING",
    marks=("eagle_config",),
    words=("Eagle", "EAGLE"),
    aliases={"vllm": ("eagle",), "sglang": ("EAGLE",), "trtllm": ("Eagle",), "train": ("eagle1",)},
)
