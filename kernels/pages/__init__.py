"""Whole pages as bytes, and their way out of a cache and back."""
