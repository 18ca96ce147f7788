"""GGUF, the file format of llama.cpp: a model, its tokenizer and its facts in one file."""

LINK = "sametoken.gguf"  # the name of the GGUF file in the directory that stands for it
