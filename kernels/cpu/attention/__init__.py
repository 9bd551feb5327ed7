"""Attention over pages on a CPU: tiles of keys in vectors, for many query rows or few.

`kernels.cpu.backend` and `kernels.cpu.layer` use it; the runner takes `arguments.items_of`.
"""
