"""The report of the cache for people and machines: JSON, page, terminal, metrics."""
