"""Where the last tokens of a text occurred before, and what followed there."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from coppice.radix.mirror.suffixes.bulk import enter_many
from coppice.radix.mirror.suffixes.hashes import (
    LONG,
    LONG_AWAY,
    LONG_FACTOR,
    MASK,
    SHORT,
    SHORT_FACTOR,
    hash_long,
    slot,
)
from coppice.radix.mirror.suffixes.text import BLOCK, BLOCK_BYTES, NOWHERE, Space, Text
from coppice.radix.node import new_tuple
from coppice.radix.tokens import TOKEN_BYTES

CONTEXT: Final = 32
"""Tokens of a text that are compared at most: a longer match says no more."""

_MANY: Final = 24  # tokens from which numpy is faster than a loop
_PIECE: Final = (
    256  # tokens of a prompt that are looked for together, and not entered if they are known
)
_KNOWN_VISITS: Final = 8  # places at which they are looked for


class Place(NamedTuple):
    """Where a text's last tokens occurred before.

    Attributes:
        length: how many of them, from the last one backwards, are equal; at most `CONTEXT`.
        following: what came next there, as int32 bytes.
    """

    length: int
    following: bytes


class Line:
    """A text that grows, such as a request's prompt and output.

    Attributes:
        length: how many of its tokens have been entered.
    """

    __slots__ = ("block", "hash", "length", "match", "position", "serial", "space")

    def __init__(self, space: Space) -> None:
        self.space = space
        self.length = 0
        self.block = NOWHERE  # that its next token is written to, if it is not full
        self.serial = NOWHERE
        self.position = NOWHERE  # of its last token, or of the same one in another text
        self.hash = 0  # of its last `LONG` tokens
        self.match = NOWHERE  # an earlier position at which the same tokens ended


class SuffixIndex:
    """Recent texts of all namespaces, and the places where their last tokens occurred before.

    Not thread-safe. Lines of one namespace find each other's tokens and those of lines that have
    ended, until newer text has taken their memory; those of other namespaces find none, whatever
    these contain.
    """

    def __init__(self, tokens: int, seed: int = 0) -> None:
        """Keeps the last `tokens` tokens or a little more. Raises ValueError below `BLOCK`.

        `seed` is of the hashes.
        """
        if tokens < BLOCK:
            raise ValueError(f"tokens must be at least {BLOCK}, got {tokens}")
        blocks = -(-tokens // BLOCK)
        self.text = Text(blocks)
        slots = 1 << (blocks * BLOCK).bit_length() - 1
        self._heads = array("i", [NOWHERE]) * slots
        self._longs = array("i", [NOWHERE]) * (slots // 2)
        self._head_shift = 32 - (slots.bit_length() - 1)
        self._long_shift = self._head_shift + 1
        self._seed = seed
        self._salts = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes: at most 16 for each token that it can keep."""
        tokens = self.text.blocks * BLOCK
        slots = len(self._heads) + len(self._longs)
        return TOKEN_BYTES * (2 * tokens + slots) + BLOCK_BYTES * self.text.blocks

    def __len__(self) -> int:
        """Tokens that it keeps now. O(blocks)."""
        return sum(self.text.filled)

    # -- lines -------------------------------------------------------------------------------

    def begin(self, namespace: Hashable) -> Line:
        """A new line, of which nothing has been entered."""
        named = self.text.named
        space = named.get(namespace)
        if space is None:
            self._salts += 1
            salt = (self._seed + self._salts) * 0x9E3779B97F4A7C15
            space = named[namespace] = Space(namespace, (salt ^ salt >> 32) & MASK)
        space.lines += 1
        return Line(space)

    def end(self, line: Line) -> None:
        """Ends a line; its tokens are found as long as there is memory for them."""
        line.space.lines -= 1
        self.text.drop_if_empty(line.space)

    def forget(self, namespace: Hashable) -> None:
        """Forgets all that was entered in a namespace; its lines go on. O(blocks)."""
        self.forget_all((namespace,))

    def forget_all(self, namespaces: Iterable[Hashable]) -> None:
        """The same for several namespaces. O(blocks), however many they are."""
        named = self.text.named
        spaces = {named[each] for each in namespaces if each in named}
        if spaces:
            self.text.forget(spaces)

    def clear(self) -> None:
        """Forgets all that was entered; lines go on. O(blocks)."""
        self.forget_all(self.text.named)

    # -- entering ----------------------------------------------------------------------------

    def enter(self, line: Line, tokens: array[int]) -> None:
        """Enters all of `tokens`, a typed array of int32, that `line` does not have yet.

        O(new tokens); pieces of a long text that are known are compared and not entered again.
        """
        begin, end = line.length, len(tokens)
        if end - begin < _MANY:
            for index in range(begin, end):
                self._enter(line, tokens, index)
            return
        most = max(self.text.blocks // 2, 1) * BLOCK
        if end - begin > most:  # it would push itself out
            begin = end - most
            line.block = line.position = NOWHERE
        known = begin
        while known + _PIECE < end:  # never the last token: its place must be this line's own
            position = self._known(line.space, tokens, known + _PIECE)
            if position < 0:
                known += _PIECE
                continue
            self._enter_many(line, tokens, begin, known)
            known += _PIECE
            begin = known
            line.block, line.position = NOWHERE, position
        self._enter_many(line, tokens, begin, end)

    def _head(self, space: Space, tokens: array[int], end: int) -> int:
        """The slot of the last `SHORT` tokens before index `end`."""
        hashed = tokens[end - 1] * SHORT_FACTOR + tokens[end - 2]
        return slot(hashed, space.salt, self._head_shift)

    def _known(self, space: Space, tokens: array[int], end: int) -> int:
        """Where the `_PIECE` tokens before `end` were entered in one piece: the last's position."""
        text, last = self.text, tokens[end - 1]
        piece = tokens[end - _PIECE : end].tobytes()
        chain = self._heads[self._head(space, tokens, end)]
        position = self._longs[slot(hash_long(tokens, end), space.salt, self._long_shift)]
        for visit in range(_KNOWN_VISITS):
            if (
                text.holds(space, position)
                and text.tokens[position] == last
                and text.before(position, _PIECE) == piece
            ):
                return position
            position = text.older[position] if visit else chain
            if position < 0:
                break
        return NOWHERE

    def _take_block(self, line: Line) -> int:
        """The block that the next token of `line` is written to, and how full it is."""
        text, block = self.text, line.block
        mine = block >= 0 and text.serials[block] == line.serial
        if mine and text.filled[block] < BLOCK:
            return block
        before = line.position if text.holds(line.space, line.position) else NOWHERE
        if block >= 0 and not mine:  # its last tokens were given away
            before = NOWHERE
        line.block = block = text.take(line.space, before, mine)
        line.serial = text.serials[block]
        return block

    def _enter(self, line: Line, tokens: array[int], index: int) -> None:
        """Enters one token."""
        text, salt, token = self.text, line.space.salt, tokens[index]
        block = self._take_block(line)
        position = block * BLOCK + text.filled[block]
        text.tokens[position] = token
        text.filled[block] += 1
        line.position, line.length = position, index + 1
        if index + 1 >= SHORT:
            at = self._head(line.space, tokens, index + 1)
            text.older[position] = self._heads[at]
            self._heads[at] = position
        else:
            text.older[position] = NOWHERE
        hashed = line.hash * LONG_FACTOR + token
        if index >= LONG:
            hashed += tokens[index - LONG] * LONG_AWAY
        line.hash = hashed = hashed & MASK
        match = line.match
        if match >= 0:
            match = text.next(match) if text.holds(line.space, match) else NOWHERE
            if match >= 0 and text.tokens[match] != token:
                match = NOWHERE
        if index + 1 >= LONG:
            at = slot(hashed, salt, self._long_shift)
            if match < 0:
                match = self._longs[at]
            self._longs[at] = position
        line.match = match

    def _enter_many(self, line: Line, tokens: array[int], begin: int, end: int) -> None:
        """Enters the tokens from index `begin` up to `end`."""
        if begin == end:
            return
        text = self.text
        line.match = NOWHERE
        if end - begin > _MANY:  # the last one alone, so that its match is known
            positions = array("i")
            index = begin
            while index < end - 1:
                block = self._take_block(line)
                filled = text.filled[block]
                count = min(BLOCK - filled, end - 1 - index)
                position = block * BLOCK + filled
                text.tokens[position : position + count] = tokens[index : index + count]
                text.filled[block] += count
                line.position = position + count - 1
                positions.extend(range(position, position + count))
                index += count
            context = min(begin, LONG - 1)
            entered = tokens[begin - context : end - 1]
            line.hash = enter_many(
                text.older, self._heads, self._longs, line.space.salt, entered, positions
            )
            begin = end - 1
        elif begin != line.length:
            line.hash = hash_long(tokens, begin)
        for index in range(begin, end):
            self._enter(line, tokens, index)

    # -- finding -----------------------------------------------------------------------------

    def find(self, line: Line, tokens: array[int], most: int, visits: int = 4) -> list[Place]:
        """Earlier places of the last tokens of a line, all of which have been entered.

        At least `SHORT` tokens are equal there. Places with more equal tokens come first, and of
        equals the latest. Where a line repeats its own last tokens they are repeated further.
        O(visits).

        Args:
            line: whose places.
            tokens: all of its tokens.
            most: of the tokens that follow on each place.
            visits: most places that are compared.
        """
        text, space, position = self.text, line.space, line.position
        if len(tokens) < SHORT or not text.holds(space, position):
            return []
        ours, last = _number(tokens[-CONTEXT:].tobytes()), tokens[-1]
        found: list[tuple[int, int, bytes]] = []
        # From the newest place on: others may have entered theirs since this line's last one.
        chain = self._heads[self._head(space, tokens, len(tokens))]
        place = first = line.match
        if place < 0:
            place = first = chain
        for visit in range(visits + 1):
            if place < 0:
                break
            if place != position and text.holds(space, place) and text.tokens[place] == last:
                before = text.before(place, CONTEXT)
                length = CONTEXT - ((ours ^ _number(before)).bit_length() + 31) // 32
                length = min(length, len(before) // TOKEN_BYTES, len(tokens))
                if length >= SHORT:
                    following = text.after(place, most)
                    count = len(following) // TOKEN_BYTES
                    if 0 < count < most and following == tokens[-count:].tobytes():
                        following = (following * (most // count + 1))[: most * TOKEN_BYTES]
                    if following:
                        found.append((-length, visit, following))
                    if len(found) == visits:
                        break
            place = chain if visit == 0 and place == line.match else text.older[place]
            if place == first:  # it was visited before the others
                place = text.older[place]
        found.sort()
        return [new_tuple(Place, (-length, following)) for length, _, following in found]


def _number(tokens: bytes) -> int:
    """The last `CONTEXT` tokens as a number: where two are equal from the end, so are its bits."""
    return int.from_bytes(tokens, "little") << 32 * CONTEXT - 8 * len(tokens)
