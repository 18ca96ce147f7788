"""Our exports served by llama.cpp as GGUF: the same tokens and acceptance as our engine; and its vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conformance import gguf_families, peer, results, templates, vocabularies
from conformance.against_vllm import APART, DRAFT_LEN, MAX_TOKENS, Run, ours, prompt_ids
from conformance.results import Result
from conformance.trained import slug, trained_heads
from sametoken.embedded import TARGET

PEER = "llama.cpp"
CONVERTER = Path(__file__).parents[1] / "benchmarks" / "peers_engines" / "gguf_convert.py"
SERVED = ("EAGLE-3", "EAGLE-3, other taps", "EAGLE-3, norm_before_residual")
LACKING = ("EAGLE-3, four taps", "EAGLE-3, two blocks", "EAGLE 3.1")


def compare(python: Path, work: Path, llama_cpp: Path) -> tuple[list[Result], dict[str, str]]:
    """Heads in the layout that its converter reads, which is ours.

    Args:
        python: an interpreter with what llama.cpp's converter needs.
        llama_cpp: its source tree, with llama-server in build/bin.
    """
    prompts, heads = prompt_ids(), trained_heads(work)
    gguf = work / "gguf-heads"
    gguf.mkdir(exist_ok=True)
    target = gguf / "target.gguf"
    convert(python, llama_cpp, [TARGET, target], work / "logs" / "gguf-target.log")
    models = llama_cpp / "models"
    found = vocabularies.compare(PEER, models) + templates.compare(PEER, models / "templates")
    server = {"server": str(llama_cpp / "build" / "bin" / "llama-server"), "draft": None}
    found += gguf_families.compare(
        PEER,
        work,
        lambda arguments, log: convert(python, llama_cpp, arguments, log),
        lambda name, job: serve(python, work, name, {**server, **job}, gguf_families.MAX_TOKENS),
    )
    versions: dict[str, str] = {}
    for name in (*SERVED, *LACKING):
        draft = gguf / f"{slug(name)}.gguf"
        try:
            log = work / "logs" / f"gguf-{slug(name)}.log"
            convert(python, llama_cpp, [heads[name], draft, "--target-model-dir", TARGET], log)
        except peer.PeerError:
            found.append(refused(name, "its converter", log.read_text().strip().splitlines()[-1][:200]))
            continue
        job = {**server, "model": str(target), "draft": str(draft)}
        answer = serve(python, work, slug(name), {**job, "prompts": prompts})
        versions |= answer["versions"]
        if "error" in answer:
            found.append(refused(name, "its server", first_error(work / "logs" / f"llama-{slug(name)}.log")))
        else:
            found.append(judge(name, ours(heads[name], prompts), answer))
    return found, versions


def convert(python: Path, llama_cpp: Path, arguments: list[Path | str], log: Path) -> None:
    """A checkpoint as GGUF in float32.

    Raises:
        PeerError: the converter refuses it.
    """
    peer.run(python, CONVERTER, [llama_cpp, *arguments, "--outtype", "f32"], log)


def serve(python: Path, work: Path, name: str, job: dict[str, Any], max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    asked, done = work / "gguf-heads" / f"{name}.json", work / "gguf-heads" / f"{name}.done.json"
    asked.write_text(json.dumps({**job, "draft_len": DRAFT_LEN, "max_tokens": max_tokens}))
    peer.run(python, "llama_serve.py", [asked, done], work / "logs" / f"llama-{name}.log")
    return peer.answer(done)


def first_error(log: Path) -> str:
    """What llama-server complained about first."""
    lines = [line.rsplit(": ", 1)[-1] for line in log.read_text().splitlines() if "error" in line]
    return lines[0] if lines else f"see {log.name}"


def refused(name: str, by: str, error: str) -> Result:
    return results.judged(PEER, name, f"{by} takes it", f"refused: {error}", name in LACKING, known=True)


def judge(name: str, mine: Run, answer: dict[str, Any]) -> Result:
    """The same tokens and as many of them drafted, per forward of the target: llama.cpp does not count its drafts."""
    same = sum(a == b for a, b in zip(mine.outputs, answer["outputs"], strict=True))
    emitted = sum(map(len, mine.outputs))
    here, there = (emitted / (emitted - accepted) for accepted in (mine.accepted, answer["accepted"]))
    found = f"{same} of {len(mine.outputs)} texts equal; {here:.3f} here, {there:.3f} there"
    holds = same == len(mine.outputs) and abs(here - there) <= APART and name in SERVED
    return results.judged(PEER, name, f"tokens; tokens per forward with chains of {DRAFT_LEN}", found, holds)
