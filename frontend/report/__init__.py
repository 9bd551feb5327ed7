"""The report of the cache for people and machines: JSON, page, terminal, metrics.

Others use `encode`, `words` and `terminal` to show a report, and `shown` for one that prints
itself; the server uses the routes and the metrics.
"""
