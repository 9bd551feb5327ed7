"""Linear layers by the kind of their weights: 16 bits, 8 bits, groups, or deterministic sums.

`runtime.model.weights` uses `select` and `grouped`; `runtime.runner.compiled_layers` uses
`eight_bit` and `grouped`.
"""
