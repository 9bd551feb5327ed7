"""What a `TreeLog` has recorded: numbers and bytes, which `marshal` can send to a process."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

#: Numbers of all records, as little-endian int64: for each a node and the kind, as
#: `node << KIND_BITS | kind`, then one or two more. The edges of those that enter tokens, and the
#: namespaces of those below a root, are apart, in order.
Records: TypeAlias = tuple[bytes, list[bytes], list[Any]]

KIND_BITS: Final = 3

# Kinds of records, with what `unpack` gives of them.
CLEARED: Final = 0  # the tree is empty
STORED: Final = 1  # node, parent, edge: `node` is new below `parent`, or has grown
STORED_BELOW_ROOT: Final = 2  # node, root, edge, namespace: the same below a root
SPLIT: Final = 3  # upper, lower, length: `upper` is new, and has the first tokens of `lower`
CUT: Final = 4  # node, length: it has its first tokens only, or has left the tree with 0

#: Bytes of the smallest record of tokens.
STORED_BYTES: Final = 16

EMPTY_TREE: Records = bytes(8), [], []


def begin_anew(records: Records) -> bool:
    """Whether the first record is that the tree is empty."""
    return records[0].startswith(EMPTY_TREE[0])


def unpack(records: Records) -> Iterator[tuple[Any, ...]]:
    """The records one by one: the kind of each, and what it has."""
    edges, namespaces = iter(records[1]), iter(records[2])
    numbers = iter(array("q", records[0]))
    for number in numbers:
        kind, node = number & (1 << KIND_BITS) - 1, number >> KIND_BITS
        if kind == STORED:
            yield kind, node, next(numbers), next(edges)
        elif kind == STORED_BELOW_ROOT:
            yield kind, node, next(numbers), next(edges), next(namespaces)
        elif kind == SPLIT:
            yield kind, node, next(numbers), next(numbers)
        elif kind == CUT:
            yield kind, node, next(numbers)
        else:
            yield (kind,)
