"""Hashes that stand for tokens in the cache's accounts: of prefixes, and of content wherever it is.

All are 64 bits wide, vectorised over a batch of pieces, and fit for counting, not for deciding what
may be reused: the tree compares tokens. The constants are odd and random; nothing depends on their
values, and the hashes of one process are never compared to those of another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.tokens import TOKEN_BYTES

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]

_MASK = 2**64 - 1
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_INDEX = np.uint64(0x9E3779B97F4A7C15)
_LENGTH = np.uint64(0xD1B54A32D192ED03)
_BYTE = np.uint8(0x2D)
_CONTENT = np.uint64(0x8CB92BA72F3D8DD7)

# Tokens are hashed in groups of so many, which stay in the processor's cache.
_GROUP_TOKENS = 1 << 18


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
        self._padding = bytes(TOKEN_BYTES * block_tokens)
        self._group_rows = _GROUP_TOKENS // block_tokens
        self._scratch = memoryview(bytearray(_GROUP_TOKENS * TOKEN_BYTES))

    def blocks(
        self, pieces: Sequence[bytes], first_blocks: Ints, chains: Hashes, parents: Ints
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

    def _hash_rows(self, pieces: Sequence[bytes], rows: Ints) -> Hashes:
        """The hash of each block by itself; a partial one is filled up with zeros."""
        scratch, width = self._scratch, self.block_tokens * TOKEN_BYTES
        words = np.frombuffer(scratch, np.uint64).reshape(-1, self.block_tokens // 2)
        hashes = np.empty(int(rows.sum()), np.uint64)
        done = filled = 0  # rows hashed, rows in the scratch

        def hash_scratch() -> None:
            np.einsum(
                "ij,j->i", words[:filled], self._multipliers, out=hashes[done : done + filled]
            )

        for piece, count in zip(pieces, rows.tolist(), strict=True):
            offset = 0
            while count:
                if filled == self._group_rows:
                    hash_scratch()
                    done, filled = done + filled, 0
                take = min(count, self._group_rows - filled)
                begin, end = filled * width, (filled + take) * width
                missing = max(0, offset + take * width - len(piece))
                if take * width == len(piece):
                    scratch[begin:end] = piece
                else:
                    scratch[begin : end - missing] = memoryview(piece)[
                        offset : offset + take * width - missing
                    ]
                    scratch[end - missing : end] = self._padding[:missing]
                offset += take * width
                filled += take
                count -= take
        hash_scratch()
        return hashes


@dataclass(frozen=True, slots=True)
class Chunks:
    """Stretches of content, pieces one after another."""

    hashes: Hashes  # of the tokens alone, wherever they stand, before a salt; see `keys`
    piece: Ints
    start: Ints  # offset in the piece, in tokens
    length: Ints


class ContentCutter:
    """Cuts tokens where their content says so, every `chunk_tokens` on average.

    A chunk begins where a hash of two neighbouring tokens has a certain value (Muthitacharoen et
    al., LBFS, SOSP 2001), so that an insertion changes the chunks that it touches and moves the
    others; borders that follow another closely are left out. A piece's first and last chunk are cut
    by the piece's own ends. A chunk's hash is of its length and its first and last 16 tokens, which
    between borders so placed tell it from all but an edited copy of the same length.
    """

    _WINDOW = 16

    def __init__(self, chunk_tokens: int) -> None:
        if not 8 <= chunk_tokens <= 128 or chunk_tokens & (chunk_tokens - 1):
            raise ValueError(f"chunk_tokens must be a power of two in 8 .. 128, got {chunk_tokens}")
        self._least = chunk_tokens // 8
        self._low_bits = np.uint8(chunk_tokens - 1)
        numbers = np.random.default_rng(chunk_tokens)
        self._multipliers = numbers.integers(0, 2**64 - 1, self._WINDOW // 2, np.uint64) | 1
        # Buffers are kept, since fresh memory costs more than its use.
        self._scratch = bytearray()
        self._low = self._mixed = np.empty(0, np.uint8)
        self._mask = np.empty(0, np.bool_)

    def chunks(self, pieces: Sequence[bytes], skipped: Sequence[int]) -> Chunks:
        """The chunks of `pieces` (int32 bytes), of each from its token `skipped[i]` on. O(tokens).

        Starts are counted from there.
        """
        parts = []
        first = tokens = 0
        for number, (piece, skip) in enumerate(zip(pieces, skipped, strict=True)):
            tokens += len(piece) // TOKEN_BYTES - skip
            if tokens >= _GROUP_TOKENS or number == len(pieces) - 1:
                end = number + 1
                parts.append(self._chunks(pieces[first:end], skipped[first:end], first))
                first, tokens = end, 0
        if len(parts) == 1:
            return Chunks(*parts[0])
        return Chunks(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _chunks(
        self, pieces: Sequence[bytes], skipped: Sequence[int], first: int
    ) -> tuple[Hashes, Ints, Ints, Ints]:
        """The chunks of a group of pieces, which are numbered from `first` on."""
        lengths = np.array([len(piece) for piece in pieces], np.int64) // TOKEN_BYTES
        lengths -= np.array(skipped, np.int64)
        present = np.flatnonzero(lengths)
        ends = np.cumsum(lengths)
        starts = (ends - lengths)[present]
        total = int(ends[-1])
        # Windows may begin before the first token and end behind the last.
        margin = self._WINDOW * TOKEN_BYTES
        if len(self._scratch) < total * TOKEN_BYTES + 2 * margin:
            self._scratch = bytearray(2 * total * TOKEN_BYTES + 2 * margin)
        filled = memoryview(self._scratch)
        at = margin
        for piece, skip in zip(pieces, skipped, strict=True):
            left = len(piece) - skip * TOKEN_BYTES
            filled[at : at + left] = memoryview(piece)[skip * TOKEN_BYTES :]
            at += left
        if len(self._low) < total:
            self._low, self._mixed = np.empty((2, 2 * total), np.uint8)
            self._mask = np.empty(2 * total, np.bool_)
        low, mixed, mask = self._low[:total], self._mixed[:total], self._mask[:total]
        # The low bytes of a token and of the one before, mixed: more would cost more.
        tokens = np.frombuffer(self._scratch, np.uint32, total, margin)
        np.copyto(low, tokens, casting="unsafe")
        np.multiply(low, _BYTE, out=mixed)
        mixed[1:] ^= low[:-1]
        mixed &= self._low_bits
        np.equal(mixed, self._low_bits, out=mask)
        cuts = np.flatnonzero(mask)

        owner = np.searchsorted(starts, cuts, side="right")
        wide = np.ones(len(cuts), np.bool_)
        wide[1:] = (cuts[1:] - cuts[:-1] >= self._least) | (owner[1:] != owner[:-1])
        cuts = cuts[wide]
        cuts = cuts[starts[owner[wide] - 1] != cuts]  # a piece's beginning is a border anyway
        begin = np.concatenate((starts, cuts))
        begin.sort()
        length = np.append(begin[1:], total) - begin
        owner = np.searchsorted(starts, begin, side="right") - 1
        hashes = self._hash(begin, length)
        return hashes, present[owner] + first, begin - starts[owner], length

    def _hash(self, begin: Ints, length: Ints) -> Hashes:
        # All windows of the buffer as overlapping items, which numpy copies whole.
        width = self._WINDOW * TOKEN_BYTES
        count = (len(self._scratch) - width) // TOKEN_BYTES
        windows = np.ndarray(count, f"V{width}", self._scratch, 0, TOKEN_BYTES)
        heads = windows[begin + self._WINDOW].view(np.uint32).reshape(-1, self._WINDOW)
        tails = windows[begin + length].view(np.uint32).reshape(-1, self._WINDOW)
        short = np.flatnonzero(length < self._WINDOW)
        if len(short):
            place = np.arange(self._WINDOW)
            heads[short] *= place < length[short, None]
            tails[short] *= place >= self._WINDOW - length[short, None]
        head = np.einsum("ij,j->i", heads.view(np.uint64), self._multipliers)
        tail = np.einsum("ij,j->i", tails.view(np.uint64), self._multipliers)
        head ^= head >> 32
        tail ^= tail >> 29
        head *= _MIX_1
        tail *= _MIX_2
        head += tail
        head += length.astype(np.uint64) * _LENGTH + _CONTENT
        return head


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
