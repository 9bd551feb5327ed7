"""Hashes of prefixes for cache accounting, and the keys of tables that are made from hashes.

All are 64 bits wide, vectorised over a batch of pieces, and fit for counting, not for deciding what
may be reused: the tree compares tokens. The constants are odd and random; nothing depends on their
values, and the hashes of one process are never compared to those of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.tokens import TOKEN_BYTES

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]

FINE_BLOCKS = 32
COARSE = 8
"""Prefixes are remembered at the ends of the first 32 blocks, and then of every eighth."""

_MASK = 2**64 - 1
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_INDEX = np.uint64(0x9E3779B97F4A7C15)
_LENGTH = np.uint64(0xD1B54A32D192ED03)

# Short pieces are hashed in groups of this many tokens.
_GROUP_TOKENS = 1 << 15
_LONG_TOKENS = 1 << 14

Tokens = bytes | memoryview

MAX_ROWS = 1 << 23
"""Keys that one call of a table can take."""

ROW_MASK = np.uint64(MAX_ROWS - 1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where each block of each piece ends, and the hash of the prefix that ends there.

    Rows are blocks, pieces one after another; a piece's last block may be partial.
    """

    hashes: Hashes  # of the whole prefix, before a salt; see `keys`
    piece: Ints  # which piece the row belongs to
    end: Ints  # position in the prompt after the row's last token
    full: NDArray[np.bool_]
    first_row: Ints  # of each piece
    chain: Hashes  # of each piece, after its last full block: where a later piece continues


@dataclass(frozen=True, slots=True)
class Borders:
    """Those ends of blocks at which prefixes are remembered, pieces one after another."""

    hashes: Hashes  # of the whole prefix, before a salt; see `keys`
    piece: Ints  # each has at least one border
    end: Ints  # position in the prompt
    first_row: Ints  # of each piece


class PrefixHasher:
    """Hashes prefixes at the borders of blocks of `block_tokens` tokens.

    A block is hashed by multilinear hashing over pairs of tokens (Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014), mixed with its index, and added to the sum over the
    blocks before it. So a sum identifies the whole prefix, all blocks of a batch are hashed at
    once, and a later piece continues from the sum where an earlier one ended.
    """

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 2 or block_tokens % 2:
            raise ValueError(f"block_tokens must be even and at least 2, got {block_tokens}")
        self.block_tokens = block_tokens
        numbers = np.random.default_rng(block_tokens)
        self._multipliers = numbers.integers(0, 2**64 - 1, block_tokens // 2, np.uint64) | 1
        self._scratch = memoryview(bytearray(_GROUP_TOKENS * TOKEN_BYTES))

    def blocks(
        self, pieces: Sequence[Tokens], first_blocks: Ints, chains: Hashes, parents: Ints
    ) -> Blocks:
        """The blocks of `pieces` (int32 bytes, none empty). O(tokens).

        Piece i begins with block `first_blocks[i]` of its prompt, whose prefix before has the hash
        `chains[i]` (0 for none) or, if `parents[i]` is not negative, the chain of that piece, which
        itself has no parent.
        """
        size = self.block_tokens
        lengths = np.array([len(piece) for piece in pieces], np.int64) // TOKEN_BYTES
        full_blocks, rest = np.divmod(lengths, size)
        partial = np.flatnonzero(rest)
        rows = full_blocks + (rest > 0)
        mixed = self._hash_rows(pieces, rows)
        after = np.cumsum(rows)
        first_row = after - rows
        index = np.arange(len(mixed)) + np.repeat(first_blocks - first_row, rows)
        mixed += index.astype(np.uint64) * _INDEX
        mixed ^= mixed >> 32
        mixed *= _MIX_1
        mixed ^= mixed >> 29
        sums = np.cumsum(mixed)
        offset = chains - sums[first_row] + mixed[first_row]
        last_full = np.maximum(first_row + full_blocks - 1, 0)
        chain = np.where(full_blocks > 0, sums[last_full] + offset, chains)
        grown = np.flatnonzero(parents >= 0)
        if len(grown):
            inherited = chain[parents[grown]]
            offset[grown] += inherited
            chain[grown] += inherited
        sums += np.repeat(offset, rows)
        end = (index + 1) * size
        full = np.ones(len(sums), np.bool_)
        if len(partial):
            # The padding of a partial block must not pass for tokens.
            last = after[partial] - 1
            sums[last] += rest[partial].astype(np.uint64) * _LENGTH
            end[last] -= size - rest[partial]
            full[last] = False
        return Blocks(sums, np.repeat(np.arange(len(rows)), rows), end, full, first_row, chain)

    def borders(self, blocks: Blocks, known: Sequence[array[int]]) -> Borders:
        """Where prefixes are remembered: at each of the first 32 borders, at one of 8 after them,
        and at the ends of pieces.

        `known[i]` are the hashes at the borders before piece i, from its prompt's beginning on.
        """
        size = self.block_tokens
        kept = _remembered((blocks.end - 1) // size) & blocks.full
        kept[blocks.first_row[1:] - 1] = True
        kept[-1:] = True
        hashes, piece, end = blocks.hashes[kept], blocks.piece[kept], blocks.end[kept]
        counts = np.array([len(each) for each in known], np.int64)
        if counts.any():
            before = np.cumsum(counts)
            index = np.arange(before[-1]) - np.repeat(before - counts, counts)
            kept = _remembered(index)
            kept[before[counts > 0] - 1] = True
            theirs = np.frombuffer(b"".join(known), np.uint64)
            hashes = np.concatenate((theirs[kept], hashes))
            piece = np.concatenate((np.repeat(np.arange(len(known)), counts)[kept], piece))
            end = np.concatenate(((index[kept] + 1) * size, end))
            order = np.argsort(piece.astype(np.uint16), kind="stable")
            hashes, piece, end = hashes[order], piece[order], end[order]
        return Borders(hashes, piece, end, piece.searchsorted(np.arange(len(known))))

    def _hash_rows(self, pieces: Sequence[Tokens], rows: Ints) -> Hashes:
        """The hash of each block by itself; a partial one is filled up with zeros."""
        scratch, width = self._scratch, self.block_tokens * TOKEN_BYTES
        words = np.frombuffer(scratch, np.uint64).reshape(-1, self.block_tokens // 2)
        hashes = np.empty(int(rows.sum()), np.uint64)
        row = filled = 0  # the next one, and how many are in the scratch
        places: list[tuple[int, int]] = []  # of these: first row, and number

        def hash_scratch() -> None:
            done = 0
            found = np.einsum("ij,j->i", words[:filled], self._multipliers)
            for first, count in places:
                hashes[first : first + count] = found[done : done + count]
                done += count
            places.clear()

        for piece, count in zip(pieces, rows.tolist(), strict=True):
            whole = len(piece) // width
            at = 0
            if count * self.block_tokens > _LONG_TOKENS:
                # Long ones are read where they are.
                own = np.frombuffer(piece, np.uint64, whole * self.block_tokens // 2)
                np.einsum("ij,j->i", own.reshape(-1, self.block_tokens // 2), self._multipliers,
                          out=hashes[row : row + whole])  # fmt: skip
                at, row, count = whole * width, row + whole, count - whole
            if filled + count > len(words):
                hash_scratch()
                filled = 0
            if count:
                begin = filled * width
                end = begin + len(piece) - at
                scratch[begin:end] = memoryview(piece)[at:] if at else piece
                filled += count
                if end < filled * width:
                    scratch[end : filled * width] = bytes(filled * width - end)
                places.append((row, count))
                row += count
        hash_scratch()
        return hashes


def _remembered(index: Ints) -> NDArray[np.bool_]:
    """Whether the prefix that ends with block number `index` is remembered."""
    return (index < FINE_BLOCKS) | (index % COARSE == COARSE - 1)


def last_border(positions: Ints, block_tokens: int) -> Ints:
    """The last of a prompt's positions up to each of these where a prefix is remembered.

    `block_tokens` is a power of two.
    """
    coarse = positions & -(COARSE * block_tokens)
    return np.where(coarse < FINE_BLOCKS * block_tokens, positions & -block_tokens, coarse)


def mix(hashes: Hashes) -> Hashes:
    """Mixes hashes in place to the last bit; returns them."""
    hashes ^= hashes >> 31
    hashes *= _MIX_1
    hashes ^= hashes >> 30
    hashes *= _MIX_2
    hashes ^= hashes >> 32
    return hashes


def keys(hashes: Hashes, salts: Hashes | np.uint64) -> Hashes:
    """Hashes as keys of a namespace: salted and mixed to the last bit; never 0 in the low half."""
    mixed = mix(hashes ^ salts)
    mixed |= 1
    return mixed


def group_equal(keys: Hashes) -> tuple[Hashes, NDArray[np.bool_]]:
    """The keys, sorted by one sort of single words, and which of them is the first of its equals.

    In each word the low bits (`ROW_MASK`) are replaced by the number of the key's row, so equal
    keys are in order of their rows. O(n log n). Raises ValueError for more than `MAX_ROWS` keys.
    """
    if len(keys) > MAX_ROWS:
        raise ValueError(f"keys: at most {MAX_ROWS} a call, got {len(keys)}")
    words = keys & ~ROW_MASK
    words |= np.arange(len(keys), dtype=np.uint64)
    words.sort()
    leads = np.ones(len(keys), np.bool_)
    np.greater(words[1:] ^ words[:-1], ROW_MASK, out=leads[1:])
    return words, leads


def namespace_salt(namespace: Hashable) -> int:
    """64 bits, never 0, that keep the keys of one namespace from those of another.

    Namespaces whose Python hashes are equal count as one, which is good enough for counting.
    """
    mixed = (hash(namespace) & _MASK) * int(_INDEX) + int(_LENGTH) & _MASK
    mixed = (mixed ^ mixed >> 29) * int(_MIX_2) & _MASK
    return (mixed ^ mixed >> 32) | 1
