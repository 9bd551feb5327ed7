"""Drafts as rows of a step: where they are, what they see of each other, which were accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coppice.kernels.attention.branches import Branches
from coppice.runtime.requests.request import Sequence
from coppice.runtime.sampling.drafts.draft import Draft
from coppice.runtime.schedule.chunks import Chunk, Schedule


class DraftRows(NamedTuple):
    """The rows of a draft: among those with logits from `first` on, a row a token.

    `start` is the position of the sequence's last token. Its row is another, as without a draft.
    The KV of the draft's tokens lies in the slots after it, in their order.
    """

    sequence: Sequence
    draft: Draft
    first: int
    start: int

    def moves(self, path: list[int], page_size: int) -> tuple[list[int], list[int]]:
        """The slots where the KV of an accepted path lies, and those where it belongs.

        Only of tokens that do not lie where they belong.
        """
        table = self.sequence.table
        places: tuple[list[int], list[int]] = ([], [])
        for depth, index in enumerate(path):
            if index != depth:
                for slots, number in zip(places, (index, depth), strict=True):
                    page, slot = divmod(self.start + 1 + number, page_size)
                    slots.append(table[page] * page_size + slot)
        return places


class LaidDrafts(NamedTuple):
    """The drafts of a step: their rows int64 [D], and the tokens of each chunk's int32 [B]."""

    drafts: tuple[DraftRows, ...]
    rows: np.ndarray
    counts: np.ndarray
    branches: Branches | None


NO_DRAFTS = LaidDrafts((), np.zeros(0, np.int64), np.zeros(0, np.int32), None)


def draft_counts(schedule: Schedule) -> np.ndarray:
    """Tokens of each chunk's draft, int32."""
    return np.array([0 if c.draft is None else len(c.draft) for c in schedule.chunks], np.int32)


def tokens_of(chunk: Chunk) -> bytes:
    """The tokens of a chunk and of its draft, int32."""
    tokens = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
    if chunk.draft is not None:
        tokens.extend(each.token for each in chunk.draft.tokens)
    return tokens.tobytes()


def lay_drafts(
    schedule: Schedule, query_start: np.ndarray, positions: np.ndarray, *, first: int
) -> LaidDrafts:
    """The drafts of a step whose chunks begin at rows `query_start`, int32 [B + 1].

    `positions` int64 [T] are of rows in a line; those of branches are changed in place. `first` is
    the number of rows with logits before those of drafts.
    """
    drafts, rows = [], []
    seen = np.zeros(len(positions), np.int64)
    for index, chunk in enumerate(schedule.chunks):
        draft = chunk.draft
        if draft is None:
            continue
        root, count = int(query_start[index]), len(draft)
        drafts.append(DraftRows(chunk.sequence, draft, first, chunk.start))
        rows.append(np.arange(root + 1, root + 1 + count))
        first += count
        if not draft.is_chain:
            bits = [1]
            for number, each in enumerate(draft.tokens, 1):
                bits.append(bits[each.parent + 1] | 1 << number)
            seen[root : root + 1 + count] = bits
            positions[root + 1 : root + 1 + count] = chunk.start + np.array(draft.depths())
    branches = Branches(positions.astype(np.int32), seen) if seen.any() else None
    return LaidDrafts(
        tuple(drafts), np.concatenate(rows).astype(np.int64), draft_counts(schedule), branches
    )
