"""GGUF, the file format of llama.cpp: a model, its tokenizer and its facts in one file."""
