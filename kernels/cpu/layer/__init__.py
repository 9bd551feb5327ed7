"""A decoder layer on a CPU: products, the work on rows between them, all layers in one call.

Other rooms use `rows`, `stack` and, of `matmul/`, `grouped` (weights in groups) and the products:
`float_products`, `int8_products`, `group_products`.
"""
