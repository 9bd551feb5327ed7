"""The engine in a process of its own, reached through a channel.

The frontend uses `messages`, `channel` and `loop.engine_main`; `service` lists the calls.
"""
