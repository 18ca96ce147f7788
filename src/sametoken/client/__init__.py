"""Client of OpenAI-compatible servers, for `synthesize`, `bench` and `chat`."""
