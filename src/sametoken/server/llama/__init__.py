"""llama-server's words: its paths, fields, replies and errors, to and from the one request that the engine knows.

Source: llama.cpp's tools/server (README.md, server-task.cpp) of 2026.
"""
