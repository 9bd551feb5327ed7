"""The demo: a handbook of facts, questions about it, and the small model that answers them.

The command uses `run`; the benchmarks use `facts`; `model/` is the model named "demo".
"""
