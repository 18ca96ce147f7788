"""Tensor parallelism: processes that each compute a part of every matrix of one target."""
