"""The Python API, under the names that vLLM uses: `LLM`, `Session` and `BeamSearchOutput`.

The package `coppice` exports them; `coppice generate` uses `LLM`.
"""
