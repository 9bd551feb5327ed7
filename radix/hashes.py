"""Hashes that stand for tokens in the cache's accounts: of prefixes, and of content wherever it is.

All are 64 bits wide, vectorised over a batch of pieces, and fit for counting, not for deciding what
may be reused: the tree compares tokens. The constants are odd and random; nothing depends on their
values, and the hashes of one process are never compared to those of another.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]

_MASK = 2**64 - 1
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_INDEX = np.uint64(0x9E3779B97F4A7C15)
_LENGTH = np.uint64(0xD1B54A32D192ED03)
_CONTENT = np.uint64(0x8CB92BA72F3D8DD7)

WINDOW = 16
"""Tokens at each end of a chunk that its hash is of."""

# Bytes are searched in groups of so many, which stay in the processor's cache.
_GROUP_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where each block of each piece ends, and what stands for the prefix that ends there.

    Rows are blocks, pieces one after another; a piece's last block may be partial.
    """

    hashes: Hashes  # of the whole prefix, before a salt; see `keys`
    piece: Ints  # which piece the row belongs to
    end: Ints  # position in the prompt after the row's last token
    full: NDArray[np.bool_]
    first_row: Ints  # of each piece
    chain: Hashes  # of each piece, after its last full block: where a later piece continues


class PrefixHasher:
    """Hashes prefixes at the borders of blocks of `block_tokens` tokens.

    A block is hashed by multilinear hashing over pairs of tokens (Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014), mixed with its index, and added to the sum over the
    blocks before it. So a sum stands for the whole prefix, all blocks of a batch are hashed at
    once, and a later piece continues from the sum where an earlier one ended.
    """

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 2 or block_tokens % 2:
            raise ValueError(f"block_tokens must be even and at least 2, got {block_tokens}")
        self.block_tokens = block_tokens
        numbers = np.random.default_rng(block_tokens)
        self._multipliers = numbers.integers(0, 2**64 - 1, block_tokens // 2, np.uint64) | 1

    def hash(self, words: Hashes, hashes: Hashes) -> None:
        """Fills in the hashes of blocks, given as pairs of tokens: (rows, size / 2). O(tokens)."""
        np.dot(words, self._multipliers, out=hashes)

    def chain(
        self, hashes: Hashes, lengths: Ints, first_blocks: Ints, chains: Hashes, parents: Ints
    ) -> Blocks:
        """The prefixes that end with the blocks of pieces of `lengths` tokens, none empty. O(rows).

        `hashes` are those of the blocks, a piece's last one filled up with zeros; they are changed.
        Piece i begins with block `first_blocks[i]` of its prompt, whose prefix before has the hash
        `chains[i]` (0 for none) or, if `parents[i]` is not negative, the chain of that piece, which
        itself has no parent.
        """
        size = self.block_tokens
        full_blocks, rest = np.divmod(lengths, size)
        partial = np.flatnonzero(rest)
        rows = full_blocks + (rest > 0)
        after = np.cumsum(rows)
        first_row = after - rows
        piece = np.repeat(np.arange(len(rows)), rows)
        index = np.arange(len(hashes)) + (first_blocks - first_row)[piece]
        mixed = hashes
        mixed += index.view(np.uint64) * _INDEX
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
        sums += offset[piece]
        index += 1
        index *= size
        full = np.ones(len(sums), np.bool_)
        if len(partial):
            # The padding of a partial block must not pass for tokens.
            last = after[partial] - 1
            sums[last] += rest[partial].astype(np.uint64) * _LENGTH
            index[last] -= size - rest[partial]
            full[last] = False
        return Blocks(sums, piece, index, full, first_row, chain)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Stretches of content, pieces one after another."""

    hashes: Hashes  # of the tokens alone, wherever they stand, before a salt; see `keys`
    piece: Ints
    start: Ints  # offset in the piece, in tokens
    length: Ints


class ContentCutter:
    """Cuts tokens where their content says so, every `chunk_tokens` on average.

    A chunk begins where the sum of two neighbouring tokens has a certain value (Muthitacharoen et
    al., LBFS, SOSP 2001), so that an insertion changes the chunks that it touches and moves the
    others; borders that follow another closely are left out. A piece's first and last chunk are cut
    by the piece's own ends. A chunk's hash is of its length and its first and last 16 tokens, which
    between borders so placed tell it from all but an edited copy of the same length. Of each token
    the low byte is enough for all this.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if not 8 <= chunk_tokens <= 512 or chunk_tokens & (chunk_tokens - 1):
            raise ValueError(f"chunk_tokens must be a power of two in 8 .. 512, got {chunk_tokens}")
        self._least = chunk_tokens // 8
        self._below = np.uint8(max(1, 256 // chunk_tokens))
        self._further = chunk_tokens > 256  # a byte is not rare enough
        numbers = np.random.default_rng(chunk_tokens)
        self._multipliers = numbers.integers(0, 2**64 - 1, 4, np.uint64) | 1
        # Kept, since fresh memory costs more than its use.
        self._mixed = np.empty(_GROUP_TOKENS, np.uint8)
        self._mask = np.empty(_GROUP_TOKENS, np.bool_)

    def cut(self, low: NDArray[np.uint8], lengths: Ints) -> Chunks:
        """The chunks of pieces of `lengths` tokens, of which `low` has the low bytes. O(tokens).

        `WINDOW` bytes of any kind stand before those of the first piece and behind the last's.
        """
        present = np.flatnonzero(lengths)
        if not len(present):
            none = np.zeros(0, np.int64)
            return Chunks(none.astype(np.uint64), none, none, none)
        ends = np.cumsum(lengths)
        starts = (ends - lengths)[present]
        total = int(ends[-1])
        cuts = self._borders(low[WINDOW : WINDOW + total])
        owner = np.searchsorted(starts, cuts, side="right")
        wide = cuts != starts[owner - 1]  # a piece's beginning is a border anyway
        wide[1:] &= (cuts[1:] - cuts[:-1] >= self._least) | (owner[1:] != owner[:-1])
        begin = np.concatenate((starts, cuts[wide]))
        begin.sort()
        length = np.empty_like(begin)
        length[:-1] = begin[1:]
        length[-1] = total
        length -= begin
        owner = np.searchsorted(starts, begin, side="right") - 1
        return Chunks(self._hash(low, begin, length), present[owner], begin - starts[owner], length)

    def _borders(self, low: NDArray[np.uint8]) -> Ints:
        """Where chunks may begin."""
        found = []
        for begin in range(0, len(low), _GROUP_TOKENS):
            part = low[begin : begin + _GROUP_TOKENS]
            mixed, mask = self._mixed[: len(part)], self._mask[: len(part)]
            np.add(part[1:], part[:-1], out=mixed[1:])
            mixed[0] = int(part[0]) + int(low[begin - 1]) & 255 if begin else self._below
            np.less(mixed, self._below, out=mask)
            found.append(np.flatnonzero(mask))
            found[-1] += begin
        cuts = np.concatenate(found)
        if self._further:
            cuts = cuts[(low[cuts] & 1) > 0]
        return cuts

    def _hash(self, low: NDArray[np.uint8], begin: Ints, length: Ints) -> Hashes:
        # All windows of the bytes as overlapping items, which numpy copies whole.
        windows = np.ndarray(len(low) - WINDOW + 1, f"V{WINDOW}", low, 0, (1,))
        heads = windows[begin + WINDOW].view(np.uint8).reshape(-1, WINDOW)
        tails = windows[begin + length].view(np.uint8).reshape(-1, WINDOW)
        short = np.flatnonzero(length < WINDOW)
        if len(short):
            place = np.arange(WINDOW)
            heads[short] *= place < length[short, None]
            tails[short] *= place >= WINDOW - length[short, None]
        head, tail = heads.view(np.uint64), tails.view(np.uint64)
        one, two, three, four = self._multipliers
        hashes = head[:, 0] * one
        hashes ^= hashes >> 32
        hashes += head[:, 1] * two
        hashes ^= hashes >> 29
        hashes += tail[:, 0] * three
        hashes ^= hashes >> 32
        hashes += tail[:, 1] * four
        hashes *= _MIX_1
        hashes += length.astype(np.uint64) * _LENGTH + _CONTENT
        return hashes


def keys(hashes: Hashes, salts: Hashes | np.uint64) -> Hashes:
    """Hashes as keys of a namespace: salted and mixed to the last bit; never 0 in the low half."""
    mixed = hashes ^ salts
    mixed ^= mixed >> 31
    mixed *= _MIX_1
    mixed ^= mixed >> 30
    mixed *= _MIX_2
    mixed ^= mixed >> 32
    mixed |= 1
    return mixed


def namespace_salt(namespace: Hashable) -> int:
    """64 bits, never 0, that keep the keys of one namespace from those of another.

    Namespaces whose Python hashes are equal are taken for one: fit for counting, as all here.
    """
    mixed = (hash(namespace) & _MASK) * int(_INDEX) + int(_LENGTH) & _MASK
    mixed = (mixed ^ mixed >> 29) * int(_MIX_2) & _MASK
    return (mixed ^ mixed >> 32) | 1
