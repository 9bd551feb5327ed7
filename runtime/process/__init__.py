"""The engine in a process of its own, reached through a channel.

The front uses `messages`, `channel` and `loop.engine_main`; `service` lists what it may ask.
"""
