"""Reasoning between two marks, before the answer, as most models write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.pieces import Piece, Reader, ReasoningPiece, held_back
from coppice.frontend.chat.reasoning.format import ReasoningFormat, Start
from coppice.runtime.requests.sampling_params import ThinkingMarks


class MarkedReasoning(ReasoningFormat):
    """Reasoning from `begin` to `end`.

    Args:
        begin: the mark before it, which the model or the prompt writes.
        end: the mark after it.
        always: whether the model always reasons, so that a text without `begin` is reasoning.
    """

    def __init__(self, begin: str, end: str, *, always: bool = False) -> None:
        self.begin, self.end = begin, end
        self.marks = (begin, end)
        self._always = always

    def start(self, end_of_prompt: str, continued: str | None) -> Start:
        if continued is not None:
            inside = continued.rfind(self.begin) > continued.rfind(self.end)
            return Start.INSIDE if inside else Start.ENDED
        last = end_of_prompt.rstrip()
        if last.endswith(self.begin):
            return Start.INSIDE
        if last.endswith(self.end):
            return Start.ENDED
        return Start.INSIDE if self._always else Start.OPEN

    def reader(self, answer: Reader, start: Start) -> Reader:
        return MarkedReader(self.begin, self.end, answer, start)

    def prefix(self, start: Start, marks: Marks) -> str | None:
        if start is Start.ENDED:
            return None
        rules = f"{marks.until('thought', self.end)}\nSPACE: /[ \\n]{{1,8}}/\n"
        if start is Start.INSIDE:
            return f"prefix: thought SPACE?\n{rules}"
        return f"prefix: ({marks.term(self.begin)} thought SPACE?)?\n{rules}"

    def count(
        self, ids: Sequence[int], start: Start, marks: Marks, decode: Callable[[list[int]], str]
    ) -> int | None:
        begin, end = marks.id(self.begin), marks.id(self.end)
        if begin is None or end is None:
            return None
        place = next((place for place, token in enumerate(ids) if token == begin), None)
        if place is not None and decode(list(ids[:place])).strip():
            place = None  # a mark in the middle of an answer
        if start is not Start.INSIDE and place is None:
            return 0
        first = 0 if place is None else place + 1
        return next((at for at in range(first, len(ids)) if ids[at] == end), len(ids)) - first

    def token_marks(self, start: Start, marks: Marks) -> ThinkingMarks | None:
        begin, end = marks.id(self.begin), marks.id(self.end)
        inside = start is Start.INSIDE
        if end is None or (begin is None and not inside):
            return None
        return ThinkingMarks(end if begin is None else begin, end, inside)


class MarkedReader(Reader):
    """Reads reasoning up to its end mark, and leaves the rest to `answer`.

    White space at the beginning of the text and around the end mark is part of neither.
    """

    def __init__(self, begin: str, end: str, answer: Reader, start: Start) -> None:
        self._begin, self._end = begin, end
        self._answer = answer
        self._inside: bool | None = True if start is Start.INSIDE else None  # None: not known yet
        self._fresh = True  # whether the reasoning has no text yet
        self._space = False  # whether white space before the answer is left out
        self._pending = ""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self._inside is not False:
            text, self._pending = self._pending + text, ""
            if self._fresh:
                text = self._begun(text)
            if self._inside and not self._fresh:
                text = self._reasoning(text, pieces)
        if self._inside is False:
            if self._space:
                text = text.lstrip()
                self._space = not text
            if text:
                pieces += self._answer.push(text)
                self.calls = self._answer.calls
        return pieces

    def _begun(self, text: str) -> str:
        """Leaves out the begin mark; text that is held back is in `_pending`."""
        stripped = text.lstrip()
        if stripped.startswith(self._begin):
            self._inside = True
            stripped = stripped[len(self._begin) :].lstrip("\n")
            if stripped:
                self._fresh = False
            else:
                self._pending = self._begin
            return stripped
        if self._begin.startswith(stripped):
            self._pending = text
            return ""
        self._fresh = False
        if self._inside is None:
            self._inside = False
            return text
        return stripped

    def _reasoning(self, text: str, pieces: list[Piece]) -> str:
        """Takes text of the reasoning; returns the text after its end."""
        before, mark, after = text.partition(self._end)
        if mark:
            self._inside, self._space = False, True
            kept = len(before.rstrip("\n"))
        else:
            kept = len(text) - held_back(text, self._end)
            kept = len(text[:kept].rstrip("\n"))
            self._pending = text[kept:]
        if kept:
            pieces.append(ReasoningPiece(before[:kept]))
        return after

    def end(self) -> list[Piece]:
        held, self._pending = self._pending, ""
        pieces: list[Piece] = []
        if self._inside is None and held:
            pieces += self._answer.push(held)
        elif self._inside and not self._fresh and (held := held.rstrip("\n")):
            pieces.append(ReasoningPiece(held))
        pieces += self._answer.end()
        self.calls = self._answer.calls
        return pieces
