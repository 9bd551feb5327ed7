"""What the cached prefixes have saved: the best of them, and the nodes of a picture of the tree."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from coppice.radix.accounting.near_misses import SHOWN_TOKENS
from coppice.radix.accounting.timeline import Timeline
from coppice.radix.node import Node, Root
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A cached prefix that later requests hit."""

    tokens: bytes = field(repr=False)  # int32, from the root
    hits: int  # requests that reused it to its end
    # Tokens not computed again thanks to it: hits x those of its tokens that lie beyond the next
    # shorter prefix with more hits. So nothing is counted twice, and all prefixes together add up.
    tokens_saved: int
    resident_pages: int = 0  # that hold its KV; the last may hold tokens after it as well
    idle_seconds: float | None = None  # since it was last used; None without a record of the times

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens from the root. O(tokens) each time."""
        return _token_ids(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A node of the tree, and what its subtree saved."""

    parent: int  # index of its parent among the nodes; -1: none, it is at the top
    namespace: Hashable
    start: int  # tokens before it
    length: int  # tokens on its edge
    hits: int  # requests that reused the prefix up to its end
    tokens_saved: int  # hits x length: tokens of this edge that were not computed again
    subtree_saved: int  # the same of this node and all below it
    token_ids: tuple[int, ...]  # the first ones of the edge, at most `SHOWN_TOKENS`

    @property
    def end(self) -> int:
        return self.start + self.length


class PrefixSavings:
    """What each node that was hit has saved, from one walk over them.

    O(nodes that were hit, and their children). Results are valid until the tree changes.
    """

    def __init__(self, tree: RadixTree, *, uses: Timeline | None = None, now: float = 0.0) -> None:
        """`uses` has the times at which the tree's clock advanced, in seconds of `now`'s clock."""
        self._page_size = tree.page_size
        self._uses = uses
        self._now = now
        self._saved: dict[Node, int] = {}  # by the node and all below it; parents come first
        self._base: dict[Node, int] = {}  # tokens of the longest prefix of it with more hits
        self._extended: set[Node] = set()  # nodes with a child that was hit as often
        for node in tree.hit_nodes():
            parent = node.parent
            assert parent is not None
            self._saved[node] = node.hits * node.length
            self._base[node] = parent.end
            if parent in self._base and parent.hits == node.hits:
                self._base[node] = self._base[parent]
                self._extended.add(parent)
        for node, saved in reversed(self._saved.items()):
            if node.parent in self._saved:
                self._saved[node.parent] += saved

    def prefixes(self, count: int) -> tuple[SharedPrefix, ...]:
        """The up to `count` prefixes that saved the most tokens, most first.

        A prefix is listed once, at its longest: one that another extends with as many hits is left
        out, and so is one that was never hit. O(n log n) for n nodes that were hit.
        """
        longest = [
            (node.hits * (node.end - base), node)
            for node, base in self._base.items()
            if node not in self._extended
        ]
        longest.sort(key=lambda entry: entry[0], reverse=True)
        return tuple(self._prefix(node, saved) for saved, node in longest[: _checked(count)])

    def _prefix(self, node: Node, saved: int) -> SharedPrefix:
        used = self._uses.time_of(node.stamp) if self._uses is not None else None
        return SharedPrefix(
            node.prefix(),
            node.hits,
            saved,
            resident_pages=-(-node.end // self._page_size),
            idle_seconds=None if used is None else max(0.0, self._now - used),
        )

    def nodes(self, count: int) -> tuple[PrefixNode, ...]:
        """The up to `count` nodes whose subtrees saved the most tokens, parents before children.

        A subtree saves no less than one inside it, so every node's parent is among them. An only
        child with as many hits as its parent continues it: both are shown as one. O(n log n) for n
        nodes that were hit.
        """
        tops = [node for node in self._saved if not _continues(node)]
        # Of equal weights the upper one first: it has the smaller start.
        tops.sort(key=lambda node: (-self._saved[node], node.start))
        places: dict[Node | None, int] = {}  # of every node of a chain
        shown: list[PrefixNode] = []
        for top in tops[: _checked(count)]:
            chain = _chain(top)
            places.update(dict.fromkeys(chain, len(shown)))
            length = chain[-1].end - top.start
            shown.append(
                PrefixNode(
                    places.get(top.parent, -1),
                    _namespace(top),
                    top.start,
                    length,
                    top.hits,
                    top.hits * length,
                    self._saved[top],
                    _first_tokens(chain),
                )
            )
        return tuple(shown)


def _checked(count: int) -> int:
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    return count


def _namespace(node: Node) -> Hashable:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node.namespace


def _continues(node: Node) -> bool:
    """Whether a node only continues its parent: an only child with as many hits."""
    parent = node.parent
    return (
        parent is not None
        and parent.parent is not None
        and len(parent.children) == 1
        and parent.hits == node.hits
    )


def _chain(top: Node) -> list[Node]:
    """`top` and the nodes below that only continue it."""
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
    return _token_ids(tokens[: SHOWN_TOKENS * TOKEN_BYTES])


def _token_ids(tokens: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(tokens, np.int32).tolist())
