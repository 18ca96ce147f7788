"""Ask a running server with OpenAI's client, and choose for each request whether and how it is drafted.

    sametoken serve --draft embedded-eagle3 --port 8000      # in one terminal
    python examples/server_client.py [URL]                   # in another; needs pip install openai

The three answers are equal: a draft changes the time, never a token.
"""

import sys

from openai import OpenAI

WAYS = {
    "without drafts": {"enabled": False},
    "as the server is set": {},
    "with at most 2 guesses": {"max_draft_len": 2},
}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")  # the key of `sametoken serve --api-key`, if it has one
    model = client.models.list().data[0].id
    answers = set()
    for name, way in WAYS.items():
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Can you recommend a good movie?"}],
            temperature=0.7,
            seed=1,
            max_tokens=64,
            extra_body={"speculative": {**way, "report": True}},
        )
        stats = reply.choices[0].speculative["stats"]
        answers.add(reply.choices[0].message.content)
        print(f"{name}: {stats['acceptance_length']:.2f} tokens for each forward of the target")
    print(answers.pop() if len(answers) == 1 else "The answers differ. Please report this.")


if __name__ == "__main__":
    main()
