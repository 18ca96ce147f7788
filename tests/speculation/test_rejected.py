"""Which guesses a completion says were rejected: transformers says what the draft guesses at every place."""

from __future__ import annotations

import pytest
import torch

from cli_checks import Pair
from sametoken import LLM, SamplingParams
from tiny_models import build

PROMPT = [60, 3]  # where the draft is right once
LONGEST = 3


@pytest.mark.usefixtures("one_thread")
def test_every_place_has_the_drafts_own_guess_accepted_or_rejected(tiny_pair: Pair) -> None:
    settings = {"max_draft_len": LONGEST, "adaptive": False}
    llm = LLM(tiny_pair.target, tiny_pair.draft, settings, dtype="float32")
    done = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))[0]
    with torch.inference_mode():
        logits = build("llama-2", 1)(torch.tensor([PROMPT + done.token_ids])).logits[0, len(PROMPT) - 1 :]
    guesses = logits.argmax(-1).tolist()
    for place, (token, drafted, rejected) in enumerate(zip(done.token_ids, done.origins, done.rejected, strict=True)):
        if drafted:
            assert (token, rejected) == (guesses[place], ())
        elif rejected:
            assert rejected == (guesses[place],)
            assert token != guesses[place]
        else:  # the prompt's own forward, a draft that came true to its end, or the last token
            ends = place == len(done.token_ids) - 1
            assert place == 0 or ends or done.origins[place - LONGEST : place] == [True] * LONGEST
    assert any(done.origins)
    assert any(done.rejected)
