"""Reports to the miss-ratio curve which stretches of prompts were used, and when last before."""

from __future__ import annotations

import numpy as np

from coppice.radix.accounting.log.batches import Batch
from coppice.radix.accounting.miss_ratio import CurvePoint, MissRatioCurve
from coppice.radix.accounting.seen.hashes import Hashes, Ints, last_border

# Borders that are reported together. The vector operations for one border cost more than what a
# thousand of them add.
_ROWS = 1 << 15


class Reuses:
    """Finds the stretches of several batches at once: tokens that were last used together."""

    def __init__(self, curve: MissRatioCurve, block_tokens: int) -> None:
        self._curve = curve
        self._block_tokens = block_tokens
        # Of each border, pieces one after another: when it was seen before, and where it is.
        self._seen = np.empty(_ROWS, np.uint32)
        self._ends = np.empty(_ROWS, np.int32)
        self._rows = 0
        self._pieces: list[tuple[Ints, Hashes, Hashes, Ints, Ints, Ints, Ints]] = []

    def record(
        self, batch: Batch, begun: Hashes, stamps: Hashes, seen: Hashes, ideal: Ints
    ) -> None:
        """The pieces of a batch were used. O(borders), but not at once.

        Args:
            batch: the pieces.
            begun: the stamps before each piece.
            stamps: the stamp of each piece's use.
            seen: of each border, the stamp at which what ends there was used before; 0: never.
            ideal: tokens of each prompt that an unlimited cache would have hit.
        """
        borders, prompts, lengths = batch.borders, batch.prompts.tokens, batch.lengths
        if not (counted := batch.counted).all():
            prompts, lengths, ideal = prompts * counted, lengths * counted, ideal * counted
            seen = seen * counted[borders.piece]
        if self._rows + len(seen) > len(self._seen):
            self._pass_on()
            if len(seen) > len(self._seen):
                self._seen = np.empty(len(seen), np.uint32)
                self._ends = np.empty(len(seen), np.int32)
        first, self._rows = self._rows, self._rows + len(seen)
        self._seen[first : self._rows] = seen
        self._ends[first : self._rows] = borders.end
        self._pieces.append((borders.first_row + first, begun, stamps, lengths,
                             batch.prompts.content_from, prompts, ideal))  # fmt: skip

    def points(self) -> tuple[CurvePoint, ...]:
        """The curve of all that was recorded."""
        self._pass_on()
        return self._curve.points()

    def clear(self) -> None:
        """The pool was emptied: what was recorded can no longer be hit."""
        self._pass_on()
        self._curve.clear()

    def _pass_on(self) -> None:
        """Reports the recorded pieces to the curve."""
        if not self._rows:
            return
        seen = self._seen[: self._rows]
        first_row, begun, stamps, lengths, start, prompts, ideal = map(
            np.concatenate, zip(*self._pieces, strict=True)
        )
        self._rows = 0
        self._pieces.clear()
        start *= prompts == 0  # what was added follows a prompt
        # A stretch ends where the last use before changes, or with its piece.
        last = np.empty(len(seen), np.bool_)
        np.not_equal(seen[1:], seen[:-1], out=last[:-1])
        last[first_row - 1] = True
        rows = last.nonzero()[0]
        before = seen[rows].astype(np.uint64)
        rows, before = rows[before > 0], before[before > 0]
        ends = self._ends[rows].astype(np.int64)
        piece = first_row.searchsorted(rows, "right") - 1
        goes_on = piece[1:] == piece[:-1]
        begins = start[piece]
        np.copyto(begins[1:], ends[:-1], where=goes_on)
        self._curve.use(
            stamps, self._whole(start, start + lengths), before, self._whole(begins, ends)
        )
        # The last one ends where the known prefix does, or before the prompt's last token.
        hit = ideal[piece]
        np.minimum(begins, hit, out=begins)
        np.minimum(ends[:-1], hit[:-1], out=hit[:-1], where=goes_on)
        ages = begun[piece] - before
        # For a hit that ends before the first border no last use is known. It is taken for recent:
        # a prefix is used at least as recently as what continues it.
        ideal[piece] = 0
        if len(at := ideal.nonzero()[0]):
            hit = np.append(hit, ideal[at])
            begins, ages = (np.append(each, np.zeros_like(at)) for each in (begins, ages))
        self._curve.prompts(ages, begins, hit, int(prompts.sum()))

    def _whole(self, begins: Ints, ends: Ints) -> Ints:
        """Tokens from border to border: those that are known again when they are used again."""
        return last_border(ends, self._block_tokens) - last_border(begins, self._block_tokens)
