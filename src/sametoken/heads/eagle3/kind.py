"""Record of EAGLE-3 and EAGLE-3.1 heads."""

from __future__ import annotations

from sametoken.embedded import HEAD_NAME
from sametoken.kinds import Kind

KIND = Kind(
    name="eagle3",
    title="EAGLE-3",
    what="an EAGLE-3 head",
    drafts="sametoken.heads.eagle3.drafts:Eagle3",
    weights="head",
    objective="sametoken.heads.eagle3.training:TRAINING",
    marks=("eagle_config", "draft_vocab_size"),
    words=("Eagle", "EAGLE"),
    aliases={
        "vllm": ("eagle3",),
        "llama-server": ("draft-eagle3",),
        "sglang": ("EAGLE3",),
        "trtllm": ("Eagle", "Eagle3"),
        "trtllm-1.2": ("Eagle",),
        "trtllm-1.3": ("Eagle3",),
        "speculators": ("eagle3",),
        "train": ("eagle3", "eagle"),
        "embedded": (HEAD_NAME,),
    },
    taps=True,
)
