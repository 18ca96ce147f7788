"""Record of the prediction blocks (MTP) inside checkpoints."""

from __future__ import annotations

from sametoken.kinds import Kind

KIND = Kind(
    name="mtp",
    title="MTP",
    what="a target with its own prediction block (MTP)",
    drafts="sametoken.heads.mtp.drafts:Mtp",
    weights="head",
    inside=True,
    aliases={
        "vllm": ("mtp",),
        "sglang": ("NEXTN",),
        "llama-server": ("draft-mtp",),
        "trtllm": ("MTP",),
        "trtllm-1.2": ("MTP",),
        "trtllm-1.3": ("MTP",),
    },
)
