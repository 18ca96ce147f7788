"""Records llama.cpp's prompts, greedy tokens and margins for published models into llama_cpp.json.

    python tests/real/record_llama_cpp.py DIR [NAME ...]

Run it where llama-cpp-python is installed; it needs no package of ours. That has the prompts rendered and tokenised and
computes the log-probabilities. The margin of a place is the distance of its best log-probability to the second best,
and `seconds` are the tokens that were second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import Llama, llama_print_system_info
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

if TYPE_CHECKING:
    from collections.abc import Mapping

FILES = {
    "coder15": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "coder05": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
}
TOKENS = 32
CHATS = (
    "Complete the following Python function. Reply with code only.\n\ndef is_prime(n: int) -> bool:\n"
    '    """Whether n is a prime number."""\n',
    "Explain in three sentences how a hash table works.",
    "Übersetze ins Englische: Der schnelle braune Fuchs springt über den faulen Hund. 🙂",
)
TEXTS = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name": "Grace", "born":',
)
CHAT_MODELS = ("coder15", "coder05", "smollm2")  # Gemma 3 270M is a base model


def rendered(llama: Llama, asked: Mapping[str, Any]) -> str:
    """The text of a prompt, through the file's own template if it is a conversation."""
    if "text" in asked:
        return str(asked["text"])
    begin, end = (llama.detokenize([token], special=True).decode() for token in (llama.token_bos(), llama.token_eos()))
    template = llama.metadata["tokenizer.chat_template"]
    return str(Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)(messages=asked["messages"]).prompt)


def answer(llama: Llama, asked: dict[str, Any]) -> dict[str, Any]:
    """A prompt with its ids, the tokens that follow greedily, their margins and the second best tokens."""
    text = rendered(llama, asked)
    # A template writes the first token itself.
    ids = llama.tokenize(text.encode(), add_bos="text" in asked, special=True)
    tokens, margins, seconds = [], [], []
    llama.reset()
    llama.eval(ids)
    while len(tokens) < TOKENS:
        logits = llama.scores[llama.n_tokens - 1].astype(np.float64)
        second, best = (int(each) for each in np.argsort(logits)[-2:])
        tokens.append(best)
        margins.append(round(float(logits[best] - logits[second]), 4))
        seconds.append(second)
        if best == llama.token_eos():
            break
        llama.eval([best])
    return {**asked, "rendered": text, "ids": ids, "tokens": tokens, "margins": margins, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("models", nargs="*", help="which are recorded anew; without them: all")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    system = llama_print_system_info().decode().strip()
    place = Path(__file__).with_name("llama_cpp.json")
    record: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {"models": {}}
    record |= {"llama-cpp-python": llama_cpp.__version__, "system": system}
    for name in chosen.models or FILES:
        path = chosen.directory / FILES[name]
        asked: list[dict[str, Any]] = [{"text": text} for text in TEXTS]
        if name in CHAT_MODELS:
            asked += [{"messages": [{"role": "user", "content": text}]} for text in CHATS]
        llama = Llama(str(path), n_ctx=1024, n_threads=chosen.threads, n_threads_batch=chosen.threads,
                      logits_all=True, verbose=False)  # fmt: skip
        answers = [answer(llama, each) for each in asked]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        record["models"][name] = {"file": path.name, "sha256": digest, "answers": answers}
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        text = text.replace('{"text"', '\n{"text"').replace('{"messages"', '\n{"messages"') + "\n"
        place.write_text(text, encoding="utf-8")
        print(f"{name}: {sum(len(each['tokens']) for each in answers)} tokens", flush=True)
        llama.close()


if __name__ == "__main__":
    main()
