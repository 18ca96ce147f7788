"""Compiled kernels: `cpu` in C++, `triton` for CUDA."""
