"""Python API, command line, OpenAI-compatible server and hit-rate reports: where text is known."""
