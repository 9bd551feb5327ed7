"""One forward pass of a scheduled batch: tensors, KV cache, graphs, compiled layers.

`runtime.engine` uses `forward.ModelRunner`.
"""
