"""Record of draft models: smaller decoders with the target's tokenizer."""

from __future__ import annotations

from sametoken.embedded import NAME
from sametoken.kinds import Kind

KIND = Kind(
    name="draft_target",
    title="draft model",
    what="a draft model",
    drafts="sametoken.heads.draft_model.drafts:DraftModel",
    weights="model",
    objective="sametoken.heads.draft_model.training:TRAINING",
    aliases={
        "vllm": ("draft_model",),
        "llama-server": ("draft-simple",),
        "sglang": ("STANDALONE",),
        "trtllm": ("DraftTarget",),
        "trtllm-1.2": ("DraftTarget",),
        "trtllm-1.3": ("Draft_Target",),
        "train": ("draft",),
        "embedded": (NAME,),
    },
)
