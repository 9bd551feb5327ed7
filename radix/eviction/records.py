"""Records: stretches of tokens with one history, cached or evicted."""

from __future__ import annotations


class Record:
    """A stretch of tokens with one history; those of a path follow each other like its nodes.

    The tokens of a live record are in the tree, a ghost's were evicted. A node's edge is covered by
    one record or several (new tokens may follow some that came back); the last of them is its
    `policy_data`.
    """

    __slots__ = ("parent", "children", "start", "length", "last", "uses", "live", "head", "samples",
                 "held", "held_children", "returned")  # fmt: skip

    def __init__(self, parent: Record | None, start: int, length: int, now: int) -> None:
        self.parent = parent  # None: the top of a namespace, or forgotten
        self.children: dict[bytes, Record] = {}  # by their first token, as in the tree
        self.start = start
        self.length = length
        self.last = now  # when it was last used, in requests
        self.uses = 1
        self.live = True
        self.head = b""  # of a ghost: its first tokens
        self.samples = b""  # of a ghost: its tokens at the positions divisible by STRIDE
        # What shadow caches know (`shadows`): a bit for each that holds it, the children that the
        # one by density holds, and when the one by segments put it back on probation.
        self.held = 0
        self.held_children = 0
        self.returned = 0
