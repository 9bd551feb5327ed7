"""The error of a pool with too few pages; apart, since no compiled class can be an exception."""

from __future__ import annotations


class OutOfPages(RuntimeError):
    """More pages were asked for than are free (or could be freed). No count has changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} pages are needed, {available} can be had")
        self.needed = needed
        self.available = available
