"""Attention on a GPU by FlashInfer's kernels, with the batch's tree cut into levels.

Other rooms take it from `kernels.backends`.
"""
