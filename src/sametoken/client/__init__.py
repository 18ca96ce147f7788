"""One client of OpenAI-compatible servers, for `synthesize`, `bench` and `chat`."""
