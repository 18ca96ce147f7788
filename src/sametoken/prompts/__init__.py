"""Prompts, built in or read from files, and their token ids."""
