"""Checkpoints whose weights are stored in 4 or 8 bits: which are read, and what decodes them.

`method` reads `quantization_config`; `view` offers the decoded weights; `bits` computes them.
"""
