"""Complete many prompts at once, without a server, and print what drafting saved.

    python examples/offline_batch.py [MODEL DRAFT]

Without arguments it uses the target and the EAGLE-3 head that come with the package.
"""

import sys

from sametoken import LLM, SamplingParams

PROMPTS = [
    "I would like to book a table for two.",
    "Can you recommend a good movie?",
    "What time does the train to Boston leave?",
    "I just got a new dog!",
]


def main() -> None:
    if len(sys.argv) not in (1, 3):
        sys.exit("usage: python examples/offline_batch.py [MODEL DRAFT]")
    model, draft = sys.argv[1:3] if len(sys.argv) == 3 else ("embedded", "embedded-eagle3")
    llm = LLM(model, draft=draft, max_batch_size=8)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    # The seed and the position of a token decide its noise: neither the batch nor the draft can change the text.
    sampling = [SamplingParams(temperature=0.7, seed=number, max_tokens=64) for number in range(len(chats))]
    for prompt, completion in zip(PROMPTS, llm.chat(chats, sampling), strict=True):
        length = completion.speculation.acceptance_length
        print(f"user: {prompt}\nassistant: {completion.text.strip()}")
        print(f"  {len(completion.token_ids)} tokens, {length:.2f} for each forward of the target\n")


if __name__ == "__main__":
    main()
