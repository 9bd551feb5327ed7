"""The report of the cache for people and machines: JSON, page, terminal, metrics.

Others use `encode`, `words` and `terminal` to show a report, `shown` for one that prints itself, and
the server the routes and the metrics.
"""
