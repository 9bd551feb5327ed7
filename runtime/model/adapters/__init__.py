"""Adapters of low rank over one model: read from PEFT's files, applied to rows, known by name."""
