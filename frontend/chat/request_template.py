"""Fills chat templates that come with requests, in a process of its own with bounds.

A template is a program. transformers' sandbox keeps it from the machine, but not from running for
ever or from making a text that fills the memory; so it runs apart from the server, which ends it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coppice.runtime.startup.worker import Worker

SECONDS = 5.0  # that filling one template may take
MEMORY_BYTES = 1 << 30  # address space beside what the process has when it starts
MOST_CHARACTERS = 16 << 20  # of the text that it makes
_WORKER = Path(__file__).with_name("request_template_worker.py")


class RequestTemplates:
    """Fills templates one after another, from any thread; the process starts with the first."""

    def __init__(self, seconds: float = SECONDS) -> None:
        limits = {"seconds": seconds, "memory": MEMORY_BYTES, "characters": MOST_CHARACTERS}
        self._worker = Worker(_WORKER, json.dumps(limits), seconds=seconds)

    def fill(self, **arguments: Any) -> str:
        """The text that `render_jinja_template` of transformers makes of one conversation.

        Raises ValueError if it fails or exceeds a bound; TypeError where the template raised that.
        """
        try:
            answer = self._worker.ask(arguments)
        except TimeoutError:
            raise ValueError(
                f"it takes more than {self._worker.seconds:g} s or {MEMORY_BYTES >> 20} MiB"
            ) from None
        if answer["error"] is None:
            return str(answer["text"])
        if answer["kind"] == "MemoryError":
            self._worker.close()  # what it has kept would be missing for the next one
        raise (TypeError if answer["kind"] == "TypeError" else ValueError)(answer["error"])

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()


REQUEST_TEMPLATES = RequestTemplates()
