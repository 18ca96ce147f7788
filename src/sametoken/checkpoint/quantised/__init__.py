"""Checkpoints with weights quantised by another tool: their schemes, and their tensors as `model.formats.coded`."""
