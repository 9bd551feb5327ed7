"""A trace of requests through the real tree and scheduler, and the page that shows what happened.

The command `coppice replay` uses `run`.
"""
