"""The KV cache of a model before any step: how many pages it has, their tensors and scales.

`runtime.runner.loaded` uses all three.
"""
