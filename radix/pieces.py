"""Hashes pieces of prompts by prefix and by content, reading each token as seldom as can be."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from coppice.radix.hashes import WINDOW, Blocks, Chunks, ContentCutter, Hashes, Ints, PrefixHasher
from coppice.radix.tokens import TOKEN_BYTES

# Pieces of fewer tokens are hashed together, since to copy them costs less than to hash each alone;
# and of less content, the bytes that it is cut by are taken by slices.
_SMALL = 4096
_LITTLE = 1024

LONG = 4096
"""Tokens that make it worth to look whether a beginning was hashed before."""

_LOW = 0 if sys.byteorder == "little" else TOKEN_BYTES - 1


class PieceHasher:
    """Hashes prefixes at the borders of blocks, and content in chunks of about the same size.

    The hashes of long beginnings that a caller names are remembered, those of the last `remembered`
    blocks at most, so that a document which many prompts begin with is hashed once.
    """

    def __init__(self, block_tokens: int, remembered: int) -> None:
        self._block_tokens = block_tokens
        self._room = remembered
        self._beginnings: dict[int, Hashes] = {}  # least recently used first
        self._prefixes = PrefixHasher(block_tokens)
        self._contents = ContentCutter(block_tokens)
        self._padding = bytes(block_tokens * TOKEN_BYTES)
        # Buffers are kept, since fresh memory costs more than its use.
        self._copies = np.empty(0, np.uint64)
        self._low = np.empty(0, np.uint8)

    def name(self, piece: bytes, tokens: int) -> int:
        """A name of the whole blocks among the first `tokens` tokens of a piece, never 0.

        O(tokens), at a tenth of the cost of their hashes while they are in the processor's cache.
        """
        width = self._block_tokens * TOKEN_BYTES
        end = tokens * TOKEN_BYTES // width * width
        return xxh3_64_intdigest(memoryview(piece)[:end]) | 1

    def hash(
        self,
        pieces: Sequence[bytes],
        names: Sequence[int],
        skipped: Ints,
        first_blocks: Ints,
        chains: Hashes,
        parents: Ints,
    ) -> tuple[Blocks, Chunks]:
        """The blocks of `pieces` (int32 bytes, none empty), and the chunks of their content.

        `names` are those of the first `skipped` tokens, of `LONG` or more of them; 0 for none.
        Content is cut from token `skipped[i]` of a piece on, and chunks' starts are counted from
        there. For the other arguments see `PrefixHasher.chain`. O(tokens).
        """
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces)) // TOKEN_BYTES
        hashes = self._hash_blocks(pieces, lengths, names, skipped // self._block_tokens)
        content = lengths - skipped
        low = self._low_bytes(pieces, skipped, content)
        return (
            self._prefixes.chain(hashes, lengths, first_blocks, chains, parents),
            self._contents.cut(low, content),
        )

    def _hash_blocks(
        self, pieces: Sequence[bytes], lengths: Ints, names: Sequence[int], named: Ints
    ) -> Hashes:
        """The hashes of all blocks, each by itself; partial ones are filled up with zeros."""
        size, words = self._block_tokens, self._block_tokens // 2
        width = size * TOKEN_BYTES
        full, rest = np.divmod(lengths, size)
        rows = full + (rest > 0)
        # Small pieces are copied whole, of the others what fills no block.
        alone = np.where(lengths < _SMALL, 0, full)
        copied = rows - alone
        after_copy, after = np.cumsum(copied), np.cumsum(rows)
        total = int(after_copy[-1])
        if len(self._copies) < total * words:
            self._copies = np.empty(total * words * 5 // 4, np.uint64)
        copies = self._copies[: total * words]
        filled = memoryview(copies).cast("B")  # type: ignore[arg-type]
        hashes = np.empty(int(after[-1]), np.uint64)
        columns = (alone, after - rows, (after_copy - copied) * width, after_copy * width, named)
        for piece, name, blocks, row, at, end, begun in zip(
            pieces, names, *(column.tolist() for column in columns), strict=True
        ):
            behind = at + len(piece)
            if blocks:
                behind -= blocks * width
                block = np.frombuffer(piece, np.uint64, blocks * words).reshape(blocks, words)
                into = hashes[row : row + blocks]
                if name:
                    self._begin(name, block[:begun], into[:begun])
                    block, into = block[begun:], into[begun:]
                if len(into):
                    self._prefixes.hash(block, into)
                filled[at:behind] = memoryview(piece)[blocks * width :]
            else:
                filled[at:behind] = piece
            if behind < end:
                filled[behind:end] = self._padding[: end - behind]
        found = np.empty(total, np.uint64)
        self._prefixes.hash(copies.reshape(total, words), found)
        if total == len(hashes):
            return found
        row = np.arange(total)
        row += np.repeat((after - rows) + alone - (after_copy - copied), copied)
        hashes[row] = found
        return hashes

    def _begin(self, name: int, words: Hashes, hashes: Hashes) -> None:
        """Fills in the hashes of the blocks of that name."""
        known = self._beginnings.pop(name, None)
        if known is None:
            self._prefixes.hash(words, hashes)
            known = hashes.copy()
            self._room -= len(known)
        else:
            hashes[:] = known
        self._beginnings[name] = known
        while self._room < 0:
            self._room += len(self._beginnings.pop(next(iter(self._beginnings))))

    def _low_bytes(self, pieces: Sequence[bytes], skipped: Ints, content: Ints) -> np.ndarray:
        """The low byte of each token of content, between margins of `WINDOW` bytes."""
        ends = np.cumsum(content) + WINDOW
        total = int(ends[-1]) + WINDOW
        if len(self._low) < total:
            self._low = np.empty(total * 5 // 4, np.uint8)
        low = self._low[:total]
        filled = memoryview(low)  # type: ignore[arg-type]
        begin = WINDOW
        for piece, skip, end in zip(pieces, skipped.tolist(), ends.tolist(), strict=True):
            if end - begin < _LITTLE:
                filled[begin:end] = piece[skip * TOKEN_BYTES + _LOW :: TOKEN_BYTES]
            else:
                low[begin:end] = np.frombuffer(piece, np.uint32, -1, skip * TOKEN_BYTES)
            begin = end
        return low
