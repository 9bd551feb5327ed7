"""The command line: one module for each command that is more than a few lines."""
