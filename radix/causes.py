"""Splits the computed tokens of prompts by cause, given what was seen before; each has one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.hashes import Blocks, Chunks, Hashes, Ints


@dataclass(frozen=True, slots=True)
class Prompts:
    """Arrays with a number for each piece of a batch; all zero for one that is no prompt."""

    tokens: Ints
    hit: Ints
    in_flight: Ints
    hit_limit: Ints  # behind it all would have been computed again for prompt logprobs
    content_from: Ints  # position where its chunks of content begin


@dataclass(frozen=True, slots=True)
class Causes:
    """Tokens by cause; in the order of precedence they follow the hit, but the last two mix."""

    last_token: Ints
    in_flight: Ints
    prompt_logprobs: Ints
    evicted: Ints
    namespace: Ints
    diverged: Ints
    cold: Ints
    ideal_tokens: Ints  # what an unlimited cache would have hit
    last_seen: Hashes  # when the longest known prefix was seen; 0 if none was
    shared: NDArray[np.bool_]  # for each chunk, whether tokens of it count as diverged


def split(
    prompts: Prompts,
    blocks: Blocks,
    chunks: Chunks,
    seen: Hashes,
    elsewhere: Hashes | None,
    seen_chunks: Hashes,
    block_tokens: int,
) -> Causes:
    """The causes of `prompts.tokens - prompts.hit` tokens each; their sum is exact.

    `seen` and `elsewhere` tell for each block when the prefix that it ends was seen before in the
    prompt's own and in other namespaces, `seen_chunks` when the content was; 0 is never. A seen
    prefix vouches for all shorter ones. O(blocks + chunks).
    """
    total, hit = prompts.tokens, prompts.hit
    known = np.where(total > 0, _longest(blocks, seen), 0)
    # The block behind the last known border was not seen whole. If the content at that border was,
    # the prefix that was seen goes on to that content's end.
    begin = chunks.start + prompts.content_from[chunks.piece]
    end = begin + chunks.length
    was_seen = seen_chunks > 0
    behind = known[chunks.piece]
    goes_on = was_seen & (begin <= behind) & (behind < end)
    goes_on &= ((known > hit) | (hit == 0))[chunks.piece]
    extended = known.copy()
    extended[chunks.piece[goes_on]] = np.minimum(end, behind + block_tokens - 1)[goes_on]
    extended = np.minimum(extended, total)
    last_row = blocks.first_row + np.maximum(-(-known // block_tokens) - 1, 0)
    last_seen = np.where(known > 0, seen[last_row], 0)

    paid = np.minimum(hit + prompts.in_flight, total)
    last = np.where(total - paid == 1, 1, 0)
    reached = np.where(last > 0, total, paid)
    at = np.maximum(reached, extended)
    again = at - np.minimum(at, np.maximum(reached, prompts.hit_limit))
    evicted = at - reached - again
    if elsewhere is not None:
        reached, at = at, np.maximum(at, np.minimum(_longest(blocks, elsewhere), total))
        namespace = at - reached
    else:
        namespace = np.zeros_like(at)
    overlap = np.minimum(end, total[chunks.piece]) - np.maximum(begin, at[chunks.piece])
    shared = was_seen & (overlap > 0)
    diverged = np.bincount(chunks.piece[shared], overlap[shared], len(total)).astype(np.int64)
    return Causes(
        last,
        prompts.in_flight,
        again,
        evicted,
        namespace,
        diverged,
        total - at - diverged,
        np.maximum(hit, np.minimum(extended, np.minimum(total - 1, prompts.hit_limit))),
        last_seen,
        shared,
    )


def _longest(blocks: Blocks, seen: Hashes) -> Ints:
    """For each piece, where its longest prefix that was seen ends."""
    return np.maximum.reduceat(np.where(seen > 0, blocks.end, 0), blocks.first_row)
