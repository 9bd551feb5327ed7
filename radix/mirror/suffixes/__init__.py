"""What followed earlier on the last tokens of a text: an index of suffixes of recent texts."""
