"""Stop strings in text that arrives in pieces: found across pieces, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one sequence's text for its stop strings.

    The string that is complete first wins; of those that are complete at the same character, the
    longest does. So the result does not depend on how the text was cut into pieces. Text that could
    begin a stop string is held back until it is clear that it does not.

    Args:
        stop: the strings, none of them empty.
        include: whether the text ends after the stop string instead of before it.

    Attributes:
        text: all text so far; once a string was found, cut there.
        matched: the stop string that was found, or None.
    """

    __slots__ = ("_include", "_longest", "_searched", "_shown", "_stop", "matched", "text")

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        # The most characters that begin one of them and are held back.
        self._longest = max(map(len, self._stop), default=1) - 1
        self._include = include
        self._searched = 0  # no match ends before this place
        self._shown = 0
        self.text = ""
        self.matched: str | None = None

    def copy(self) -> StopStrings:
        """An independent copy."""
        other = StopStrings(self._stop, include=self._include)
        other._searched, other._shown = self._searched, self._shown
        other.text, other.matched = self.text, self.matched
        return other

    def push(self, piece: str, *, armed: bool = True) -> None:
        """Adds text. While not `armed` (min_tokens), no stop string can end in it.

        Raises:
            RuntimeError: a stop string was found before; nothing can follow it.
        """
        if self.matched is not None:
            raise RuntimeError(f"text continues after the stop string {self.matched!r}")
        self.text += piece
        if armed and self._stop:
            self._search()
        self._searched = len(self.text)

    def take(self, *, final: bool = False) -> str:
        """The text that may be shown and was not returned before; all of it when `final`."""
        end = len(self.text)
        if self._longest and not final and self.matched is None:
            end -= self._possible_beginning()
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _search(self) -> None:
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self.text.find(stop, max(0, self._searched - len(stop) + 1))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, self.matched = found
            self.text = self.text[: end if self._include else start]

    def _possible_beginning(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0
