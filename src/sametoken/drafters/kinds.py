"""Records of the drafter kinds that need no weights."""

from __future__ import annotations

from sametoken.kinds import Kind

NGRAM = Kind(
    name="ngram",
    title="n-gram lookup",
    what="n-gram lookup",
    drafts="sametoken.drafters.ngram:build",
    mixed=False,  # suffix lookup finds the same matches, and longer ones
    aliases={
        "vllm": ("ngram", "ngram_gpu"),
        "llama-server": ("ngram-simple", "ngram-map-k", "ngram-map-k4v"),
        "sglang": ("NGRAM",),
        "trtllm": ("NGram",),
        "trtllm-1.2": ("NGram",),
        "trtllm-1.3": ("NGram",),
    },
)
SUFFIX = Kind(
    name="suffix",
    title="suffix lookup",
    what="suffix lookup",
    drafts="sametoken.drafters.suffix:build",
    unasked=12,
    aliases={
        "vllm": ("suffix",),
        "llama-server": ("ngram-mod", "ngram-cache"),
        "trtllm": ("SA",),
        "trtllm-1.3": ("SA",),
    },
)
PREDICTION = Kind(
    name="prediction",
    title="predicted output",
    what="a predicted output",
    drafts="sametoken.drafters.prediction:build",
    comes_with="prediction",
)
FORCED = Kind(
    name="forced",
    title="tokens that a grammar forces",
    what="the tokens that a grammar leaves no choice about",
    drafts="sametoken.drafters.forced:build",
    comes_with="structured_outputs",
)
