"""Linear layers by the kind of their weights: 16 bits, 8 bits, or deterministic sums.

`runtime.model.layers` uses it.
"""
