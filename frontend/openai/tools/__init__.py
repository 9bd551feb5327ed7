"""Calls of tools: which may be called, how models write them, and how they are read."""
