"""The tree and the scheduler without a model: replays of traces, and simulation.

The front uses `replay`.
"""
