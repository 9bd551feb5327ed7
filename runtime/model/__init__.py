"""The network: its config, its weights, its layers, and where a model is found.

`runtime.runner` uses it; the front uses `path`.
"""
