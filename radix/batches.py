"""Requests that are processed together, and the hashes of all their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounts import RequestAccount
from coppice.radix.causes import Prompts
from coppice.radix.hashes import Blocks, Chunks, ContentCutter, Hashes, PrefixHasher, keys

TICKS = 16
"""A second, in the times by which things are remembered. The first tick is 1: 0 is never."""


class Growth:
    """Tokens that a request added behind its prompt, and what it takes to hash them."""

    __slots__ = ("tokens", "salt", "first_block", "chain", "parent", "content_from", "time")

    def __init__(
        self,
        tokens: bytes,
        salt: int,
        first_block: int,
        chain: int,
        parent: int,
        content_from: int,
        time: float,
    ) -> None:
        self.tokens = tokens
        self.salt = salt
        self.first_block = first_block
        self.chain = chain
        self.parent = parent
        self.content_from = content_from
        self.time = time


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests and growths that are processed together, and the hashes of their tokens."""

    requests: list[RequestAccount | None]  # None: a growth
    pieces: list[bytes]
    prompts: Prompts
    cross: NDArray[np.bool_]
    salts: Hashes
    times: NDArray[np.float64]  # seconds since the start
    ticks: Hashes
    blocks: Blocks
    prefix_keys: Hashes  # one for each block
    chunks: Chunks
    chunk_keys: Hashes


class BatchHasher:
    """Hashes prefixes at the borders of blocks, and content in chunks of about the same size."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._prefixes = PrefixHasher(block_tokens)
        self._contents = ContentCutter(block_tokens)

    def hash(self, items: Sequence[RequestAccount | Growth], start: float) -> Batch:
        """The batch of these items; a growth may name an earlier one as its parent. O(tokens)."""
        pieces = [item.tokens for item in items]
        first_blocks = np.array([item.first_block for item in items])
        chains = np.array([item.chain for item in items], np.uint64)
        parents = np.array([item.parent for item in items])
        blocks = self._prefixes.blocks(pieces, first_blocks, chains, parents)
        content_from = np.array([item.content_from for item in items])
        skipped = content_from - first_blocks * self._block_tokens
        chunks = self._contents.chunks(pieces, skipped.tolist())
        salts = np.array([item.salt for item in items], np.uint64)
        times = np.array([item.time for item in items]) - start
        requests = [item if isinstance(item, RequestAccount) else None for item in items]
        numbers = np.array(
            [(request.prompt_tokens, request.hit_tokens, request.in_flight_tokens,
              request.hit_limit) if request else (0, 0, 0, 0) for request in requests]
        )  # fmt: skip
        return Batch(
            requests,
            pieces,
            Prompts(numbers[:, 0], numbers[:, 1], numbers[:, 2], numbers[:, 3], content_from),
            np.array([request is not None and request.kind == "cross" for request in requests]),
            salts,
            times,
            (times * TICKS).astype(np.uint64) + 1,
            blocks,
            keys(blocks.hashes, salts[blocks.piece]),
            chunks,
            keys(chunks.hashes, salts[chunks.piece]),
        )
