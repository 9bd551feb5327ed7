"""Tokens to text as they come, without broken characters where a token ends inside one.

A tokenizer's `decode` is a function of the whole sequence: a character may be spread over several
tokens, and some decoders treat the first token of what they are given differently (they drop the
space before it). So new text is the difference between two decodings of the last few tokens, which
begin a little before the new ones:

    ids   . . . . [ context | new ]
                  ^start    ^clean
    text          [ sent    | to send ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# Tokens that may be decoded again with each new one before the context moves on. Moving it costs a
# decoding, too.
AGAIN = 8


class IncrementalDecoder:
    """Turns one sequence's tokens into pieces of text that add up to the decoding of them all.

    Text is held back while it ends in U+FFFD, which decoders return for bytes that are not yet a
    whole character. The pieces, the flushed one included, add up to `decode` of all tokens, with
    one exception: where a byte-fallback decoder turns a run of bytes into U+FFFD because one of
    them is invalid, characters that were returned before stay whole here.

    Args:
        decode: token ids to text, special tokens dropped or not as the caller wants.
        before: tokens that the text continues, which are no part of it: after them the first token
            keeps the space that begins it (see `Tokenizer.text_before`).
    """

    __slots__ = ("_clean", "_decode", "_ids", "_sent", "_start")

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before)
        self._start = 0  # first token that is decoded again
        self._clean = len(self._ids)  # tokens before it were decoded to whole characters
        # Characters of the text from `_start` on that were returned.
        self._sent = len(decode(self._ids)) if self._ids else 0

    def copy(self) -> IncrementalDecoder:
        """An independent copy. O(tokens that are decoded again)."""
        other = IncrementalDecoder(self._decode)
        other._ids = self._ids[self._start :]
        other._clean, other._sent = self._clean - self._start, self._sent
        return other

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete. Costs a decoding of the last few tokens."""
        self._ids += token_ids
        text = self._decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT):
            return self._send(text, len(text.rstrip(REPLACEMENT)))
        piece = self._send(text, len(text))
        if piece and len(self._ids) - self._start > AGAIN:
            self._start = self._clean
            self._sent = len(self._decode(self._ids[self._start :]))
        if piece:
            self._clean = len(self._ids)
        return piece

    def flush(self) -> str:
        """What was held back, with U+FFFD where bytes are missing; for the end of the sequence."""
        text = self._decode(self._ids[self._start :])
        return self._send(text, len(text))

    def _send(self, text: str, end: int) -> str:
        if end <= self._sent:
            return ""
        piece = text[self._sent : end]
        self._sent = end
        return piece
