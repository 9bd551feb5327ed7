"""Tries a grammar in a process of its own, since a bad one may take hours, or end its process.

What is tried: that it compiles in time, and that some text follows it.
"""

from __future__ import annotations

import json
from pathlib import Path

from coppice.runtime.startup.worker import Worker

SECONDS = 5.0  # that one grammar may take
#: llguidance's limits on trial and in use: objects of 2,000 properties need more than its own.
LIMITS = {"max_items_in_row": 8192, "max_lexer_states": 100_000, "verbose_errors": False}
_WORKER = Path(__file__).with_name("trial_worker.py")


class Trials:
    """Runs trials one after another, from any thread; the process starts with the first."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._worker = Worker(_WORKER, json.dumps(LIMITS), seconds=seconds)

    def run(self, grammar: str) -> list[str]:
        """llguidance's warnings about a grammar. Raises ValueError if it can't be followed."""
        try:
            result = self._worker.ask(grammar)
        except TimeoutError:
            raise ValueError(
                f"it takes more than {self._worker.seconds:g} s, or more memory or nesting than "
                f"there is, to compile"
            ) from None
        if result["error"]:
            raise ValueError(result["error"])
        warnings: list[str] = result["warnings"]
        return warnings

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()


TRIALS = Trials()
