"""What is counted while an engine runs: requests, tokens, steps, times, pages, causes of misses.

The frontend uses `histogram.Histogram`; `runtime.report` makes its snapshots from all of it.
"""
