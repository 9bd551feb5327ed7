"""A picture of the tree as it is: the nodes that saved the most, without their pages."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from coppice.radix import Node, RadixTree
from coppice.radix.tokens import TOKEN_BYTES

SHOWN_TOKENS = 48
"""Tokens that are kept of an edge: the first ones."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A node, and what its subtree saved."""

    parent: int  # place of its parent among the nodes; -1: none, it is at the top
    namespace: Hashable
    start: int  # tokens before it
    length: int  # tokens on its edge
    hits: int  # requests that reused the prefix up to its end
    tokens_saved: int  # hits x length: tokens of this edge that were not computed again
    subtree_saved: int  # the same of this node and all below it
    token_ids: tuple[int, ...]  # the first ones of the edge

    @property
    def end(self) -> int:
        return self.start + self.length


def heaviest_nodes(tree: RadixTree, count: int) -> tuple[PrefixNode, ...]:
    """The up to `count` nodes whose subtrees saved the most tokens, parents before children.

    A subtree saves no less than one inside it, so every node's parent is among them. An only child
    with as many hits as its parent continues it: both are shown as one. O(n log n) for
    n nodes that were hit, and their children.
    """
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    nodes = list(tree.hit_nodes())
    saved: dict[int, int] = {}
    for node in reversed(nodes):  # children first
        below = sum(saved[id(child)] for child in node.children.values() if child.hits)
        saved[id(node)] = node.hits * node.length + below
    # Of equal weights the upper one first: it has the smaller start.
    tops = [node for node in nodes if not _continues(node)]
    tops.sort(key=lambda node: (-saved[id(node)], node.start))
    places: dict[int, int] = {}  # of every node of a chain, by its id
    shown: list[PrefixNode] = []
    for top in tops[:count]:
        chain = _chain(top)
        for node in chain:
            places[id(node)] = len(shown)
        root = top.path()[0].parent
        shown.append(
            PrefixNode(
                places.get(id(top.parent), -1),
                getattr(root, "namespace", None),
                top.start,
                chain[-1].end - top.start,
                top.hits,
                top.hits * (chain[-1].end - top.start),
                saved[id(top)],
                _first_tokens(chain),
            )
        )
    return tuple(shown)


def _continues(node: Node) -> bool:
    """Whether it only goes on with what its parent began."""
    parent = node.parent
    return (
        parent is not None
        and parent.parent is not None
        and len(parent.children) == 1
        and parent.hits == node.hits
    )


def _chain(top: Node) -> list[Node]:
    chain = [top]
    while len(chain[-1].children) == 1:
        (child,) = chain[-1].children.values()
        if child.hits != top.hits:
            break
        chain.append(child)
    return chain


def _first_tokens(chain: list[Node]) -> tuple[int, ...]:
    tokens = b""
    for node in chain:
        tokens += node.edge[: min(node.length, SHOWN_TOKENS) * TOKEN_BYTES]
        if len(tokens) >= SHOWN_TOKENS * TOKEN_BYTES:
            break
    return tuple(np.frombuffer(tokens, np.int32)[:SHOWN_TOKENS].tolist())
