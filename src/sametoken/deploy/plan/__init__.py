"""One speculative configuration for four engines: the start command of each engine, and deployment files."""
