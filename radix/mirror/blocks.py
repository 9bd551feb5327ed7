"""Whole blocks of tokens that a tree holds, by their hashes, made of its changes.

The size of a block does not depend on that of a page. Consumers of vLLM's events know a cache in
this form: a block is stored once, with the node in which its last token lies, and removed once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from coppice.radix.mirror.changes import Change, Cleared, Cut, Split, Stored
from coppice.radix.mirror.copy import CopyNode, TreeCopy
from coppice.radix.mirror.page_hashes import extend_chain, root_hash
from coppice.radix.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Whole blocks of one prompt that can be hit from now on, in order.

    Attributes:
        namespace: the prompt's.
        parent_hash: hash of the block before the first, or the namespace's root hash.
        hashes: one for each block.
        tokens: the tokens of the blocks as int32 bytes, `block_size` for each.
    """

    namespace: Hashable
    parent_hash: int
    hashes: tuple[int, ...]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Blocks that can no longer be hit in full, last first."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """The tree was emptied. Also the first event of a stream that restarts after a loss."""


Event = PagesStored | PagesRemoved | PagesCleared


class Blocks:
    """Turns the changes of a tree into events of its whole blocks.

    Attributes:
        copy: the tree after all changes that were taken.
    """

    def __init__(self, block_size: int, *, seed: int = 0) -> None:
        """`seed` is that of the hashes. Raises ValueError for a block size below 1."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.copy = TreeCopy()
        self._size, self._seed = block_size, seed

    def take(self, change: Change) -> Event | None:
        """What a change does to the blocks, if anything. O(its tokens)."""
        size = self._size
        if isinstance(change, Cut):
            node = self.copy.nodes.get(change.node)
            removed: tuple[int, ...] = ()
            if node is not None:
                keep = (node.start + change.length) // size - node.start // size
                removed = tuple(reversed(node.hashes[keep:]))
                del node.hashes[keep:]
            self.copy.apply(change)
            return PagesRemoved(removed) if removed else None
        applied = self.copy.apply(change)
        if isinstance(change, Cleared):
            return PagesCleared()
        assert applied is not None
        if isinstance(change, Split):
            upper = applied.parent
            assert upper is not None
            taken = upper.end // size - upper.start // size
            upper.hashes, applied.hashes = applied.hashes[:taken], applied.hashes[taken:]
        elif isinstance(change, Stored):
            return self._extend(applied)
        else:
            applied.hashes.append(root_hash(applied.namespace, self._seed))
        return None

    def everything(self) -> list[Event]:
        """`PagesCleared` and all blocks that the tree holds, parents first. O(tree)."""
        found: list[Event] = [PagesCleared()]
        waiting = list(self.copy.roots.values())
        while waiting:
            node = waiting.pop()
            if node.hashes and node.parent is not None:
                found.append(self._event(node, 0))
            waiting += node.children.values()
        return found

    def _extend(self, node: CopyNode) -> PagesStored | None:
        """The blocks that tokens at the end of `node` have completed."""
        size, known = self._size, len(node.hashes)
        first = node.start // size + known
        if node.end // size <= first:
            return None
        tokens = node.tokens_from(first * size)
        parent = self._parent(node, known)
        node.hashes += extend_chain(parent, tokens, size, self._seed)
        return self._event(node, known)

    def _event(self, node: CopyNode, known: int) -> PagesStored:
        """The event for the blocks of `node` after its first `known` ones."""
        size = self._size
        hashes = tuple(node.hashes[known:])
        begin = (node.start // size + known) * size
        tokens = node.tokens_from(begin)[: len(hashes) * size * TOKEN_BYTES]
        root = node
        while root.parent is not None:
            root = root.parent
        return PagesStored(root.namespace, self._parent(node, known), hashes, tokens)

    @staticmethod
    def _parent(node: CopyNode, known: int) -> int:
        """The hash before block `known` of those that end in `node`: a block's, or the root's."""
        if known:
            return node.hashes[known - 1]
        above = node.parent
        while above is not None and not above.hashes:
            above = above.parent
        assert above is not None, "a root without its hash"
        return above.hashes[-1]
