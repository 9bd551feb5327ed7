"""Attention over pages and the few operations on the KV cache: one interface, several backends."""
