"""The tree and the scheduler without a model: replays of traces, and simulation.

The frontend uses `replay`.
"""
