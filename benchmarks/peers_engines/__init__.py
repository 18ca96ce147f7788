"""The parts of peers.py: one file per engine, and what they share."""
