"""Comparisons with code that is not ours: `make conformance`. Peers run in environments of their own, by their own API."""
