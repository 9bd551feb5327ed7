"""What each step computes: the queue, admission, the pages of sequences, the time of steps.

`runtime.engine` and `runtime.offline` use it.
"""
