"""Compiled CPU kernels, built from C++ when the package is installed; torch replaces missing ones, more slowly."""
