"""Tensor parallelism: several processes, each of which computes a part of every matrix of one target."""
