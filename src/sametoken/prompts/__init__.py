"""Prompts: built in or read from files, and as the token ids that a model reads."""
