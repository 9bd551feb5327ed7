"""The shared prefixes of a tree that saved the most tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coppice.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A cached prefix that later requests hit."""

    token_ids: tuple[int, ...]  # from the root
    hits: int  # requests that reused it to its end
    tokens_saved: int  # tokens of it that were not computed again: hits x its tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def top_prefixes(tree: RadixTree, count: int) -> tuple[SharedPrefix, ...]:
    """The up to `count` prefixes with the most tokens saved, most first.

    A prefix is named once, at its longest: one that another extends with as many hits is left
    out, and so is one that was never hit. O(nodes of the tree).
    """
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    hit = [
        node
        for node in tree.nodes()
        if node.hits and not any(child.hits >= node.hits for child in node.children.values())
    ]
    hit.sort(key=lambda node: node.hits * node.end, reverse=True)
    return tuple(
        SharedPrefix(
            tuple(np.frombuffer(node.prefix(), np.int32).tolist()), node.hits, node.hits * node.end
        )
        for node in hit[:count]
    )
