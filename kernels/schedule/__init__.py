"""The schedule of attention: which keys are read once for several rows, and in which pieces.

The backends use it; the runner takes `cpu` for the compiled layers and a constant of `items`.
"""
