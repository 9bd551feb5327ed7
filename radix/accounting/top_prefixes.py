"""The shared prefixes of a tree that saved the most tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coppice.radix.accounting.timeline import Timeline
from coppice.radix.node import Node
from coppice.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A cached prefix that later requests hit."""

    token_ids: tuple[int, ...]  # from the root
    hits: int  # requests that reused it to its end
    # Tokens not computed again thanks to it: hits x those of its tokens that lie beyond the next
    # shorter prefix with more hits. So nothing is counted twice, and all prefixes together add up.
    tokens_saved: int
    resident_pages: int = 0  # that hold its KV; some may hold other tokens behind it as well
    idle_seconds: float | None = None  # since it was last used; None if nobody kept the times

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def top_prefixes(
    tree: RadixTree, count: int, *, uses: Timeline | None = None, now: float = 0.0
) -> tuple[SharedPrefix, ...]:
    """The up to `count` prefixes that saved the most tokens, most first.

    A prefix is named once, at its longest: one that another extends with as many hits is left
    out, and so is one that was never hit. `uses` tells when the tree's clock reached its marks, in
    seconds of the same clock as `now`. O(nodes that were hit and their children, times chains of
    equal hits).
    """
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    hit = [
        (node.hits * (node.end - _end_of_more_hits(node)), node)
        for node in tree.hit_nodes()
        if not any(child.hits >= node.hits for child in node.children.values())
    ]
    hit.sort(key=lambda saved: saved[0], reverse=True)
    prefixes = []
    for saved, node in hit[:count]:
        tokens = tuple(np.frombuffer(node.prefix(), np.int32).tolist())
        used = uses.time_of(node.stamp) if uses is not None else None
        idle = None if used is None else max(0.0, now - used)
        pages = -(-node.end // tree.page_size)
        prefixes.append(SharedPrefix(tokens, node.hits, saved, pages, idle))
    return tuple(prefixes)


def _end_of_more_hits(node: Node) -> int:
    """Tokens of the longest prefix of this one that was hit more often."""
    above = node.parent
    while above is not None and above.hits <= node.hits:
        above = above.parent
    return above.end if above is not None else 0
