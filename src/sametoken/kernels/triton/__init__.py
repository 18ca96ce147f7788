"""Kernels for CUDA in Triton; importing a module needs triton."""
