"""Requests that are processed together, and the hashes of all their tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounts import Numbers, RequestAccount
from coppice.radix.causes import Prompts
from coppice.radix.hashes import Blocks, Chunks, Hashes, Ints, keys
from coppice.radix.pieces import PieceHasher
from coppice.radix.tokens import TOKEN_BYTES


class Growth:
    """Tokens that a request added behind its prompt, and what it takes to hash them."""

    __slots__ = ("namespace", "tokens", "chain", "time", "numbers")

    name = 0

    def __init__(
        self,
        namespace: Hashable,
        tokens: bytes,
        chain: int,
        time: float,
        numbers: Numbers,
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.chain = chain
        self.time = time
        self.numbers = numbers


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests and growths that are processed together, and the hashes of their tokens."""

    requests: list[RequestAccount]
    request_pieces: Ints  # of each of these
    pieces: list[bytes]
    lengths: Ints  # of the pieces, in tokens
    prompts: Prompts
    cross: NDArray[np.bool_]
    salts: Hashes
    times: NDArray[np.float64]  # seconds since the start
    blocks: Blocks
    prefix_keys: Hashes  # one for each block
    chunks: Chunks
    chunk_keys: Hashes


class BatchHasher:
    """Turns requests and growths into batches."""

    def __init__(self, block_tokens: int, pool_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._pieces = PieceHasher(block_tokens, pool_tokens // block_tokens)
        self.name = self._pieces.name

    def hash(self, items: Sequence[RequestAccount | Growth], salts: Hashes, start: float) -> Batch:
        """The batch of these items; a growth may name an earlier one as its parent. O(tokens)."""
        count = len(items)
        pieces = [item.tokens for item in items]
        width = 7  # of `Numbers`
        numbers = np.fromiter(
            chain.from_iterable([item.numbers for item in items]), np.int64, width * count
        )
        columns = numbers.reshape(count, width).T.copy()
        tokens, hit, in_flight, cross, content_from, first_blocks, parents = columns
        request_pieces = np.flatnonzero(tokens)
        chains = np.zeros(count, np.uint64)
        if len(request_pieces) < count:
            grown = np.flatnonzero(tokens == 0)
            chains[grown] = [items[piece].chain for piece in grown.tolist()]
        blocks, chunks = self._pieces.hash(
            pieces,
            [item.name for item in items],
            content_from - first_blocks * self._block_tokens,
            first_blocks,
            chains,
            parents,
        )
        return Batch(
            [item for item in items if isinstance(item, RequestAccount)],
            request_pieces,
            pieces,
            np.fromiter(map(len, pieces), np.int64, count) // TOKEN_BYTES,
            Prompts(tokens, hit, in_flight, content_from),
            cross > 0,
            salts,
            np.fromiter([item.time for item in items], np.float64, count) - start,
            blocks,
            _keys(blocks.hashes, salts, blocks.piece),
            chunks,
            _keys(chunks.hashes, salts, chunks.piece),
        )


def _keys(hashes: Hashes, salts: Hashes, pieces: Ints) -> Hashes:
    """The keys of hashes from these pieces."""
    return keys(hashes, salts[pieces] if salts.any() else np.uint64(0))
