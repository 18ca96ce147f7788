"""Checkpoints whose weights another tool quantised: what they state, and their tensors as `model.formats.coded`."""
