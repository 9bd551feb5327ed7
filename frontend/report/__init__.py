"""The report of the cache as JSON, page and terminal output, and the metrics.

Other folders use `encode`, `words` and `terminal` to show a report, and `shown` for one that prints
itself; the server uses `routes`, `dashboard_files`, `reporter` and `metrics`.
"""
