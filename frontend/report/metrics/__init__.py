"""The metrics at /metrics: of the server, and of the engine."""
