"""Attention, cache writes, products and row work on a GPU, in Triton.

Other rooms use `rows` and `products`; attention they take from `kernels.backends`.
"""
