"""Linear layers by the kind of their weights: 16 bits, 8 bits, or deterministic sums.

`runtime.model.weights` uses `select`; `runtime.runner.compiled_layers` uses `eight_bit`.
"""
