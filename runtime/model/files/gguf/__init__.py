"""GGUF files, through the package `gguf` and transformers' tables: a folder of one, its tensors."""
