"""One snapshot of everything that an engine reports about its cache and its steps.

The front uses the dataclasses in it.
"""
