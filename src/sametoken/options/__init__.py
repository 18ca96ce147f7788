"""Declarations of all options: type, limits, default, help, and names in other tools."""
