"""A decoder layer on a CPU: products, the work on rows between them, all layers in one call.

Other rooms use `float_products`, `int8_products`, `rows` and `stack`.
"""
