"""Comparisons with code that is not ours, by `make conformance`; peers run in environments of their own."""
