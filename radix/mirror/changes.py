"""Changes of a tree as operations on its nodes: what a copy of it in another process applies.

A node has a number, which is never used again. An operation carries the tokens that are new, and
nothing that follows from earlier ones: a prompt of 100,000 tokens of which ten are new costs as
much as ten.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

from coppice.radix.mirror import records
from coppice.radix.mirror.log import TreeLog
from coppice.radix.mirror.records import Records
from coppice.radix.namespace import Namespace, encode_namespace
from coppice.radix.tokens import TOKEN_BYTES
from coppice.radix.tree import RadixTree


class Opened(NamedTuple):
    """`node` is the root of a namespace, which has no tokens yet."""

    node: int
    namespace: Hashable


class Stored(NamedTuple):
    """`node` ends with `tokens` from position `start` on, as int32 bytes; it may be new."""

    node: int
    parent: int
    start: int
    tokens: bytes


class Split(NamedTuple):
    """The first `length` tokens of the edge of `node` are now a node of their own, `upper`."""

    node: int
    upper: int
    length: int


class Cut(NamedTuple):
    """`node` has its first `length` tokens alone; with 0 it has left the tree.

    With its last child a namespace's root has left, too.
    """

    node: int
    length: int


class Cleared(NamedTuple):
    """The tree is empty. Also the first change of a stream that restarts after a loss."""


Change: TypeAlias = Opened | Stored | Split | Cut | Cleared


#: A node's number, start and end, and the root if that is its parent.
_Place: TypeAlias = tuple[int, int, int, int | None]


class Translator:
    """Turns the records of a `TreeLog` into changes; in any thread or process."""

    def __init__(self) -> None:
        self._numbers = 0
        self._known: dict[int, _Place] = {}  # of each node that is in the tree
        self._roots: dict[int, list[int]] = {}  # number of each, and of its children

    def translate(self, batch: Records) -> list[Change]:
        """The changes that these records, which follow the last ones, stand for. O(new tokens)."""
        known, found = self._known, list[Change]()
        for record in records.unpack(batch):
            match record:
                case (records.STORED, node, parent, edge):
                    self._store(found, node, edge, known[parent], None)
                case (records.STORED_BELOW_ROOT, node, root, edge, fields):
                    self._open(found, root, fields)
                    self._store(found, node, edge, (self._roots[root][0], 0, 0, None), root)
                case (records.SPLIT, upper, lower, length):
                    number, start, end, root = known[lower]
                    known[upper] = self._number(), start, start + length, root
                    known[lower] = number, start + length, end, None
                    found.append(Split(number, self._numbers, length))
                case (records.CUT, node, length):
                    number, start, _, root = known[node]
                    found.append(Cut(number, length))
                    if length:
                        known[node] = number, start, start + length, root
                    else:
                        self._forget(node, root)
                case _:
                    known.clear()
                    self._roots.clear()
                    found.append(Cleared())
        return found

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _open(self, found: list[Change], root: int, fields: tuple[Any, ...] | None) -> None:
        if root not in self._roots:
            self._roots[root] = [self._number(), 0]
            found.append(Opened(self._numbers, None if fields is None else Namespace(*fields)))

    def _store(
        self, found: list[Change], node: int, edge: bytes, above: _Place, root: int | None
    ) -> None:
        parent, _, start, _ = above
        number, _, before, _ = self._known.get(node, (0, start, start, None))
        if not number:
            number = self._number()
            if root is not None:
                self._roots[root][1] += 1
        self._known[node] = number, start, start + len(edge) // TOKEN_BYTES, root
        if tokens := edge[(before - start) * TOKEN_BYTES :]:
            found.append(Stored(number, parent, before, tokens))

    def _forget(self, node: int, root: int | None) -> None:
        """Forgets a node, and with its last child a root, of whose leaving there is no record."""
        del self._known[node]
        if root is not None:
            self._roots[root][1] -= 1
            if not self._roots[root][1]:
                del self._roots[root]


class TreeChanges:
    """A bounded stream of a tree's changes, for one reader.

    It begins with what the tree holds. A reader that is too slow loses nothing silently: when more
    than `limit` changes wait they are dropped, and the next drain gives `Cleared` and all that the
    tree holds.

    Raises ValueError for a limit below 1, and for a namespace in the tree that has no encoding that
    is the same everywhere; while the stream is attached, the tree refuses locks in such a one.
    """

    def __init__(self, tree: RadixTree, *, limit: int = 100_000) -> None:
        self._tree, self._log = tree, attached(tree, limit)
        self._translator = Translator()

    @property
    def restarts(self) -> int:
        """Times that changes were dropped."""
        return self._log.restarts

    def drain(self) -> list[Change]:
        """All changes since the last call, in order. O(their tokens), or O(tree) after a loss."""
        return self._translator.translate(self._log.drain())

    def everything(self) -> list[Change]:
        """`Cleared` and all that the tree holds, under new numbers, instead of what waits."""
        return self._translator.translate(self._log.everything())

    def close(self) -> None:
        """Ends the stream."""
        self._tree.remove_listener(self._log)


def attached(tree: RadixTree, limit: int = 100_000) -> TreeLog:
    """A log that listens to a tree. Raises ValueError as `TreeChanges`."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    for namespace in tree.roots:
        encode_namespace(namespace)
    log = TreeLog(tree, limit)
    tree.add_listener(log)
    return log
