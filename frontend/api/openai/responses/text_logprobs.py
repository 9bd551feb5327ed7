"""Which tokens of a text, beside reasoning and calls, are its answer, whose logprobs are shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from coppice.frontend.api.openai.logprobs import Place
from coppice.frontend.chat.pieces import CallBegins, Piece, Reader, TextPiece


class TextLogprobs:
    """Reads one continuation, and finds the tokens of each piece of text.

    A reader leaves marks out and holds back what may become one, so its pieces are found again in
    the text, which is handed to it token by token. Tokens of which a part is text count as text;
    tokens without text, as that of the end, do not.

    Args:
        reader: of the continuation.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._tokens: deque[tuple[int, Place]] = deque()  # that may be of the text, by offset
        self._fed = 0  # characters that the reader has
        self._unread = ""  # those of them that no piece has
        self._starts: deque[int] = deque()  # where tokens begin that the reader does not have

    def push(
        self, text: str, places: Sequence[Place], offsets: Sequence[int], *, last: bool
    ) -> list[tuple[Piece, list[Place]]]:
        """The pieces that the next text completes, each with the logprobs of its tokens.

        `offsets` are the characters of the whole text before each of the new tokens.
        """
        self._tokens.extend(zip(offsets, places, strict=True))
        self._starts.extend(offsets)
        found: list[tuple[Piece, list[Place]]] = []
        for part in self._parts(text):
            self._unread += part
            self._fed += len(part)
            self._take(self._reader.push(part), found)
        if last:
            self._take(self._reader.end(), found)
        return found

    def _parts(self, text: str) -> Iterator[str]:
        """The text, cut where tokens begin."""
        begin, end = self._fed, self._fed + len(text)
        at = begin
        while self._starts and self._starts[0] < end:
            start = self._starts.popleft()
            if start > at:
                yield text[at - begin : start - begin]
                at = start
        if at < end:
            yield text[at - begin :]

    def _take(self, pieces: Sequence[Piece], found: list[tuple[Piece, list[Place]]]) -> None:
        for piece in pieces:
            first, after = self._place_of(piece)
            tokens = self._of_text(first, after) if isinstance(piece, TextPiece) else []
            text, before = found[-1] if found else (None, [])
            if isinstance(piece, TextPiece) and isinstance(text, TextPiece):
                found[-1] = TextPiece(text.text + piece.text), before + tokens
            else:
                found.append((piece, tokens))

    def _place_of(self, piece: Piece) -> tuple[int, int]:
        """Where the piece begins and ends in the text; what comes before it has no other piece."""
        wanted: str = piece.name if isinstance(piece, CallBegins) else piece.text
        at = self._unread.find(wanted)
        start = self._fed - len(self._unread)
        if at < 0:  # arguments that were written in another way than JSON
            return start, start
        self._unread = self._unread[at + len(wanted) :]
        return start + at, start + at + len(wanted)

    def _of_text(self, first: int, after: int) -> list[Place]:
        """Takes the tokens up to the end of a piece; returns those that are part of it."""
        tokens, found = self._tokens, []
        while tokens and tokens[0][0] < after:
            offset, place = tokens.popleft()
            reaches = not tokens or tokens[0][0] > first
            if offset >= first or reaches:
                found.append(place)
        return found
