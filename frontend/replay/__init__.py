"""Replays a trace of requests through the real tree and scheduler, and reports what the cache did.

The command `coppice replay` uses `run`.
"""
