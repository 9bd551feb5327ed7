"""Events of the tree for other processes: ZeroMQ sockets, wire formats, the engine's load.

`runtime.config` uses `options`, `runtime.engine.publishing` uses `stream`.
"""
