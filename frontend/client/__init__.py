"""The engine in a process of its own, for coroutines: start, submit, read, ask, restart.

Other folders use `EngineClient`, `EngineProcess`, and `Deltas`, the pieces of a request's answer.
"""
