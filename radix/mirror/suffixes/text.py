"""The tokens of recent texts, in blocks of which the one taken first is given away first."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Final

from coppice.radix.tokens import TOKEN_BYTES

BLOCK: Final = 64
"""Tokens of a block. Each belongs to one text, so a text wastes half of one on average."""

NOWHERE: Final = -1
"""In place of a position, a block or a serial number: there is none."""

# Bytes that a block takes beside its tokens: the fields of `Text` with an entry for each.
BLOCK_BYTES = 8 + 4 + 8 + 4 + 8 + 4 + 8


class Space:
    """A namespace whose texts are kept; those of two never meet.

    Attributes:
        namespace: its name.
        salt: what its hashes begin with.
        blocks, lines: how many of each are its; without any it is dropped.
    """

    __slots__ = ("blocks", "lines", "namespace", "salt")

    def __init__(self, namespace: Hashable, salt: int) -> None:
        self.namespace = namespace
        self.salt = salt
        self.blocks = 0
        self.lines = 0


class Text:
    """A bounded number of tokens, at positions `block * BLOCK + offset`.

    A text goes on from one of its blocks to the next. A new text may go on from the middle of
    another one, which has its first tokens: a fork, or a prompt whose beginning is known. A block
    that is given away takes its links with it, since they hold the serial number of its owner.

        position   0 .. 63 | 64 .. 127 | 128 .. 191
        text a     # # # # | # # # # # |
        text b                    `-----> # # # .      the position before its first is in `a`

    Attributes:
        blocks: how many there are.
        named: the spaces by their namespaces.
        tokens: array of all positions.
        older: for each position, another one where the same few tokens ended before.
        spaces: whose each block is; None: nobody's.
        filled: tokens of each block.
        serials: a number for each time that a block is taken.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.named: dict[Hashable, Space] = {}
        nothing = array("i", [NOWHERE])
        self.tokens = nothing * (blocks * BLOCK)
        self.older = nothing * (blocks * BLOCK)
        self.spaces: list[Space | None] = [None] * blocks
        self.filled = array("i", [0]) * blocks
        self.serials = array("q", [NOWHERE]) * blocks
        self._before = nothing * blocks  # position of the token before the first
        self._before_serials = array("q", [NOWHERE]) * blocks
        self._after = nothing * blocks  # the block in which the text goes on
        self._after_serials = array("q", [NOWHERE]) * blocks
        self._taken = 0

    def take(self, space: Space, before: int, link: bool) -> int:
        """The oldest block, empty, for a text of `space` that goes on from the position `before`.

        With `link` the text at `before` goes on here, too.
        """
        block = self._taken % self.blocks
        owner = self.spaces[block]
        if owner is not None:
            owner.blocks -= 1
            if owner is not space:
                self.drop_if_empty(owner)
        space.blocks += 1
        self.spaces[block] = space
        self.filled[block] = 0
        self.serials[block] = self._taken
        if before >= 0 and before // BLOCK == block:  # it has just lost what it goes on from
            before = NOWHERE
        self._before[block] = before
        self._before_serials[block] = self.serials[before // BLOCK] if before >= 0 else NOWHERE
        self._after[block] = NOWHERE
        if link and before >= 0:
            self._after[before // BLOCK] = block
            self._after_serials[before // BLOCK] = self._taken
        self._taken += 1
        return block

    def forget(self, spaces: set[Space]) -> None:
        """Empties all blocks of some spaces. O(blocks), however many spaces."""
        for block, owner in enumerate(self.spaces):
            if owner in spaces:
                self.spaces[block] = None
                self.filled[block] = 0
                self.serials[block] = NOWHERE
        for space in spaces:
            space.blocks = 0
            self.drop_if_empty(space)

    def drop_if_empty(self, space: Space) -> None:
        """Forgets the name of a space that has nothing."""
        if not space.lines and not space.blocks and self.named.get(space.namespace) is space:
            del self.named[space.namespace]

    def holds(self, space: Space, position: int) -> bool:
        """Whether a token of `space` is at `position`."""
        if position < 0:
            return False
        block = position // BLOCK
        return self.spaces[block] is space and position - block * BLOCK < self.filled[block]

    def next(self, position: int) -> int:
        """The position after one that holds a token; NOWHERE if the text ends there."""
        block = position // BLOCK
        offset = position - block * BLOCK + 1
        if offset < self.filled[block]:
            return position + 1
        if offset < BLOCK:
            return NOWHERE
        after = self._after[block]
        if after < 0 or self.serials[after] != self._after_serials[block] or not self.filled[after]:
            return NOWHERE
        return after * BLOCK

    def before(self, position: int, most: int) -> bytes:
        """The last of the tokens up to `position`, itself included, as int32 bytes: `most` if there
        are so many."""
        block = position // BLOCK
        begin = block * BLOCK
        if position - begin >= most:
            begin = position - most + 1
        found = self.tokens[begin : position + 1].tobytes()
        missing = most - (position + 1 - begin)
        while missing > 0:
            position = self._before[block]
            if position < 0 or self.serials[position // BLOCK] != self._before_serials[block]:
                break
            block = position // BLOCK
            begin = block * BLOCK
            if position - begin >= missing:
                begin = position - missing + 1
            found = self.tokens[begin : position + 1].tobytes() + found
            missing -= position + 1 - begin
        return found

    def after(self, position: int, most: int) -> bytes:
        """The tokens that follow on `position`, at most `most`, as int32 bytes."""
        block = position // BLOCK
        begin = position + 1
        end = block * BLOCK + self.filled[block]
        if end - begin >= most:
            return self.tokens[begin : begin + most].tobytes()
        found = self.tokens[begin:end].tobytes()
        while end == (block + 1) * BLOCK:
            after = self._after[block]
            if after < 0 or self.serials[after] != self._after_serials[block]:
                break
            block = after
            begin = block * BLOCK
            end = begin + self.filled[block]
            missing = most - len(found) // TOKEN_BYTES
            if end - begin >= missing:
                return found + self.tokens[begin : begin + missing].tobytes()
            found += self.tokens[begin:end].tobytes()
        return found
