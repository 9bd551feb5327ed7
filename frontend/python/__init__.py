"""The Python API: `LLM`, `Session` and their results, under the names that vLLM uses."""
