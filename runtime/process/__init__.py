"""The engine behind a channel, in a process of its own.

The front uses `messages`, `channel` and `loop.engine_main`; `service` lists what it may ask.
"""
