"""Calls whose parameters stand between tags of their own, texts as they are, all else as JSON."""
