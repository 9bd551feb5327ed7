"""A decoder layer on a CPU: products, the work on rows between them, all layers in one call.

Other rooms use `rows`, `stack` and, of `matmul/`, `float_products` and `int8_products`.
"""
