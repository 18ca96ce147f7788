"""Compiled CPU kernels, built from C++ when the package is installed; everything works without them, only slower."""
