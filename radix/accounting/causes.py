"""Splits the computed tokens of prompts by cause, given what was seen before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.seen.anchors import WINDOW, Anchors
from coppice.radix.accounting.seen.hashes import COARSE, FINE_BLOCKS, Borders, Hashes, Ints


@dataclass(frozen=True, slots=True)
class Prompts:
    """Arrays with a number for each piece of a batch; all zero for one that is no prompt."""

    tokens: Ints
    hit: Ints
    in_flight: Ints
    hit_limit: Ints  # from here on all is computed in any case, for prompt logprobs
    content_from: Ints  # position where its anchors' starts are counted from
    held_elsewhere: Ints | None  # tokens from the beginning that another replica holds; None: none


@dataclass(frozen=True, slots=True)
class Causes:
    """Tokens of each prompt by cause. Each token has one: the first that applies, in this order."""

    last_token: Ints
    in_flight: Ints
    other_replica: Ints
    prompt_logprobs: Ints
    evicted: Ints
    namespace: Ints
    diverged: Ints
    cold: Ints
    ideal_tokens: Ints  # what one unlimited cache for all replicas would have hit
    known_tokens: Ints  # of these, what an unlimited cache of this replica would have hit
    last_seen: Hashes  # when the longest known prefix was seen; 0 if none was
    shared: NDArray[np.bool_]  # for each anchor, whether tokens after it count as diverged
    begin: Ints  # for each anchor, the first and
    end: Ints  # the position after the last token that would


def split(
    prompts: Prompts,
    borders: Borders,
    anchors: Anchors,
    seen: Hashes,
    elsewhere: Hashes | None,
    seen_anchors: NDArray[np.bool_],
    block_tokens: int,
) -> Causes:
    """The computed tokens of each prompt by cause; they add up to `prompts.tokens - prompts.hit`.

    `seen` and `elsewhere` have for each border the stamp with which the prefix that ends there was
    seen before, in the prompt's own and in other namespaces; 0 is never. If a prefix was seen, so
    were all shorter ones. `seen_anchors` marks the anchors whose content was seen; the tokens
    between two of them count as seen, too. O(borders + anchors).
    """
    total, hit = prompts.tokens, prompts.hit
    row = _last(seen, borders.first_row)
    found = (row >= 0) & (total > 0)
    known = np.where(found, borders.end[row], 0)
    last_seen = np.where(found, seen[row], np.uint64(0))
    # What follows the last known border was not seen up to the next one. If the content at that
    # border was, the prefix that was seen continues to where content was seen no more.
    piece, begin = anchors.piece, anchors.start + prompts.content_from[anchors.piece]
    joined = seen_anchors.copy()  # to the next one, which was seen as well
    joined[:-1] &= seen_anchors[1:] & (piece[1:] == piece[:-1])
    joined[-1:] = False
    end = begin + np.where(joined, anchors.length, WINDOW)
    border = known[piece]
    continued = seen_anchors & (begin <= border) & (border < end)
    continued &= ((known > hit) | (hit == 0))[piece]
    extended = known.copy()
    rows = np.flatnonzero(continued)
    if len(rows):
        lasts = np.flatnonzero(~joined)
        run_end = end[lasts[np.searchsorted(lasts, rows)]]
        border = border[rows]
        space = np.where(border < FINE_BLOCKS * block_tokens, 1, COARSE) * block_tokens
        extended[piece[rows]] = np.minimum(run_end, border + space - 1)
        extended = np.minimum(extended, total)
    paid = np.minimum(hit + prompts.in_flight, total)
    last = np.where(total - paid == 1, 1, 0)
    reached = np.where(last > 0, total, paid)
    limit = np.maximum(reached, prompts.hit_limit)
    most = np.minimum(total - 1, prompts.hit_limit)
    at = np.maximum(reached, extended)
    ideal = known_tokens = np.maximum(hit, np.minimum(extended, most))
    other_replica = np.zeros_like(at)
    if prompts.held_elsewhere is not None:
        held = np.minimum(prompts.held_elsewhere, total)
        other_replica = np.maximum(np.minimum(held, limit), reached) - reached
        at = np.maximum(at, held)
        ideal = np.maximum(ideal, np.minimum(held, most))
    again = at - np.minimum(at, limit)
    evicted = at - reached - other_replica - again
    if elsewhere is not None:
        row = _last(elsewhere, borders.first_row)
        over = np.where(row >= 0, borders.end[row], 0)
        reached, at = at, np.maximum(at, np.minimum(over, total))
        namespace = at - reached
    else:
        namespace = np.zeros_like(at)
    begin, end = np.maximum(begin, at[piece]), np.minimum(end, total[piece])
    overlap = end - begin
    shared = seen_anchors & (overlap > 0)
    diverged = np.bincount(piece[shared], overlap[shared], len(total)).astype(np.int64)
    return Causes(
        last,
        prompts.in_flight,
        other_replica,
        again,
        evicted,
        namespace,
        diverged,
        total - at - diverged,
        ideal,
        known_tokens,
        last_seen,
        shared,
        begin,
        end,
    )


def _last(seen: Hashes, first_row: Ints) -> Ints:
    """For each piece its last row that was seen; -1 if none was."""
    rows = np.where(seen > 0, np.arange(len(seen)), -1)
    return np.maximum.reduceat(rows, first_row)
