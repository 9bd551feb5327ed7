"""One snapshot of everything that an engine reports about its cache and its steps.

Others use the dataclasses of `snapshot`, and `gather` to make them of an engine.
"""
