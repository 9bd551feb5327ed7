"""The engine in another process, with a face for asyncio: submit, read, ask, restart."""
