"""Suggestions of a path or field in place of one that is mistyped or belongs to another server."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from sametoken.errors import unknown_name

# Paths of Ollama, TGI and SGLang, and of clients that are configured with an address without /v1.
PATHS = {
    **dict.fromkeys(("/api/generate", "/generate", "/generate_stream"), "/v1/completions"),
    **dict.fromkeys(("/api/chat", "/v1/chat"), "/v1/chat/completions"),
    **dict.fromkeys(("/api/embed", "/api/embeddings", "/embedding"), "/v1/embeddings"),
    **dict.fromkeys(("/api/tags", "/v1"), "/v1/models"),
    "/messages": "/v1/messages",
}
# Fields of Ollama, llama.cpp, transformers, TGI and vLLM.
FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("n_predict", "num_predict"), "the limit is max_tokens, in /v1/responses max_output_tokens"),
    **dict.fromkeys(("options", "parameters"), "send each of its keys as a field of its own"),
    **dict.fromkeys(
        ("num_speculative_tokens", "num_assistant_tokens", "speculative.n_max"), "send speculative.max_draft_len"
    ),
    **dict.fromkeys(("num_ctx", "n_ctx"), "the context is the server's option --max-seq-len"),
    "do_sample": "leave it out; temperature 0 is greedy, more is sampled",
    "keep_alive": "leave it out; the model stays loaded",
    "inputs": "send prompt to /v1/completions, or messages to /v1/chat/completions",
}


def of_path(path: str, known: Iterable[str]) -> str:
    """Suggestion of a path to use instead of an unknown path; "" if no path is near.

    Args:
        known: all paths of the server.
    """
    near = PATHS.get(path.rstrip("/")) or next(iter(difflib.get_close_matches(path, list(known), n=1, cutoff=0.8)), "")
    return f"ask {near}, or " if near else ""


def of_field(name: str, known: Iterable[str]) -> str:
    """Error message for an unknown field of a body, with the field to send instead."""
    if name in FIELDS:
        return f"unknown field {name!r}: {FIELDS[name]}"
    return unknown_name("field", name, known)
