"""Whose turn it is: the queue, admission, the pages of sequences, and the time of steps.

`runtime.engine` and `runtime.offline` use it.
"""
