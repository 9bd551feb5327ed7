"""Python API, command line, OpenAI-compatible server and hit-rate reports: where text is known."""

import coppice.runtime  # noqa: F401  (before transformers: it settles how threads wait)
