"""Whose turn it is: the queue, admission, pages of a sequence, and what a step may cost.

`runtime.engine` and `runtime.offline` use it.
"""
