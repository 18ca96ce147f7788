"""One speculative configuration for four engines: what each engine is started with, and the files that start it."""
