"""Rows of a step that are trees of tokens: what each of them sees of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Rows of a sequence that may be a tree.
MOST_BRANCHED = 63


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The rows of a step's sequences that are trees of tokens.

    ``positions`` int32 ``[T]``: of every row of the step; in a tree that of its first row, the
    root, plus the row's depth. ``seen`` int64 ``[T]``: bit i of a row of a tree is whether it sees
    row i of its sequence, that is itself and its ancestors; 0 for rows of other sequences.
    """

    positions: np.ndarray
    seen: np.ndarray

    def check(self, query_start: np.ndarray, context_len: np.ndarray) -> None:
        """Refuse branches that do not fit a plan: ``ValueError``, by name."""
        rows = int(query_start[-1])
        for name, dtype in (("positions", np.int32), ("seen", np.int64)):
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (rows,):
                raise ValueError(
                    f"{name} of branches is {array.dtype} {array.shape}; it must be a 1-d "
                    f"{np.dtype(dtype).name} array of {rows}, one for each row"
                )
        counts = np.diff(query_start)
        first = np.repeat(query_start[:-1], counts)
        number = np.arange(rows) - first
        tree = self.seen[first] != 0
        # Each row of a tree sees itself and the root, and none after itself; others no row.
        last = self.seen >> np.minimum(number, MOST_BRANCHED - 1)
        bad = np.where(tree, (last != 1) | (self.seen & 1 != 1), self.seen != 0)
        bad |= tree & (np.repeat(counts, counts) > MOST_BRANCHED)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"seen of branches is {self.seen[row]} in row {row}, number {number[row]} of its "
                f"sequence; it must have the bits of that number, of the tree's root and of no "
                f"later row, in trees of at most {MOST_BRANCHED} rows, and none in other sequences"
            )
        ends = np.repeat(context_len - counts, counts)
        # In a tree a row's depth is the number of its ancestors.
        at = ends + np.where(tree, np.bitwise_count(self.seen).astype(np.int64) - 1, number)
        bad = self.positions != at
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"positions of branches is {self.positions[row]} in row {row}; it must be {at[row]}"
            )

    def windowed(self, window: int | None, query_start: np.ndarray) -> np.ndarray:
        """``seen`` for layers with that sliding window. O(rows of trees squared) if it is short."""
        if window is None or window >= MOST_BRANCHED:
            return self.seen
        seen = self.seen.copy()
        counts = np.diff(query_start)
        first = np.repeat(query_start[:-1], counts)
        for row in np.flatnonzero(seen).tolist():
            start = int(first[row])
            near = self.positions[start : row + 1] > self.positions[row] - window
            bits = np.left_shift(np.int64(1), np.flatnonzero(near)).sum(dtype=np.int64)
            seen[row] &= bits
        return seen
