"""Attention and decoder layers on a CPU, compiled with numba, or in torch where that fails.

Other rooms use `layer` for products and rows, and `code.threads`; `backends` gives them attention.
"""
