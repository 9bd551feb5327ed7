"""How compiled code is written and run: vectors, threads that work together, calls by address.

Other rooms use `threads`, which settles how many threads there are, `processor`, by which
products choose their path, and `hadamard`, through which the weights of int8 products pass.
"""
