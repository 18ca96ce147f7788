"""llama-server's API: its paths, fields, replies and errors, converted to and from the engine's requests.

Source: llama.cpp's tools/server (README.md, server-task.cpp) of 2026.
"""
