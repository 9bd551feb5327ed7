"""Requests that are processed together, and the hashes of all their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounting.causes import Prompts
from coppice.radix.accounting.log.account import RequestAccount
from coppice.radix.accounting.log.items import Growth
from coppice.radix.accounting.seen.anchors import AnchorFinder, Anchors
from coppice.radix.accounting.seen.hashes import (
    Blocks,
    Borders,
    Hashes,
    Ints,
    PrefixHasher,
    Tokens,
    keys,
)
from coppice.radix.node import Node
from coppice.radix.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests and growths that are processed together, and the hashes of their tokens."""

    requests: list[RequestAccount | None]  # None: a growth
    lengths: Ints  # tokens that each used: its prompt, or what it has added
    times: NDArray[np.float64]
    prompts: Prompts
    counted: NDArray[np.bool_]  # not a further sequence of a request, or one that came back
    salts: Hashes
    borders: Borders
    border_keys: Hashes
    chains: list[int]  # of each item, after its last whole block
    tails: list[bytes]  # the tokens of each after that
    anchors: Anchors
    anchor_keys: Hashes


class BatchHasher:
    """Hashes prefixes at the borders of blocks, and content at its anchors.

    What hit is not hashed twice: the hashes up to the end of a hit are kept in the tree, at the
    node where it ended (`Node.borders`), and later hits that end there or below begin with them.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._prefixes = PrefixHasher(block_tokens)
        self._contents = AnchorFinder()

    def hash(
        self, items: Sequence[RequestAccount | Growth], first: int, salts: Sequence[int]
    ) -> Batch:
        """The batch of these items, of which the first has the serial number `first`. O(tokens)."""
        size = self._block_tokens
        width = size * TOKEN_BYTES
        requests: list[RequestAccount | None] = []
        pieces: list[Tokens] = []
        known: list[array[int]] = []
        chains: list[int] = []
        flat: list[int] = []
        held: list[tuple[int, int]] = []  # the pieces of which another replica holds tokens
        unknown: list[tuple[Node, int, int]] = []  # where hits end, borders there, and the piece
        for item in items:
            if isinstance(item, RequestAccount):
                tokens, prompt, hit = item.tokens, item.prompt_tokens, item.hit_tokens
                before = _NOTHING
                if item.node is not None:
                    # Something of the prompt is always left to be hashed.
                    whole = (hit if hit < prompt else prompt - 1) // size
                    before = _known_borders(item.node, whole, size)
                    if len(before) < whole:
                        unknown.append((item.node, whole, len(requests)))
                count = len(before)
                requests.append(item)
                known.append(before)
                chains.append(before[-1] if count else 0)
                pieces.append(memoryview(tokens)[count * width :] if count else tokens)
                flat += (count, -1, hit, prompt, prompt, hit, item.in_flight_tokens,
                         item.hit_limit)  # fmt: skip
                if item.held_elsewhere:
                    held.append((len(requests) - 1, item.held_elsewhere))
            else:
                account, added = item.account, item.added
                prompt, tail, chain = account.prompt_tokens, account.tokens, account.chain
                count = prompt // size
                if account.place >= 0:
                    chain, tail = 0, tail[count * width :]
                requests.append(None)
                known.append(_NOTHING)
                chains.append(chain)
                pieces.append(tail + added)
                length = len(added) // TOKEN_BYTES
                flat += (count, account.place - first, prompt, length, 0, 0, 0, 0)
        counts, parents, content_from, lengths, prompt_tokens, hits, in_flight, limits = (
            np.frombuffer(array("q", flat), np.int64).reshape(-1, 8).T.copy()
        )
        starts = np.frombuffer(array("Q", chains), np.uint64)
        hashed = self._prefixes.blocks(pieces, counts, starts, parents)
        for node, whole, number in unknown:
            _keep(node, whole, known[number], hashed, number)
        borders = self._prefixes.borders(hashed, known)
        anchors = self._contents.find(pieces, (content_from - counts * size).tolist())
        salt = np.array(salts, np.uint64)
        return Batch(
            requests,
            lengths,
            np.array([item.time for item in items]),
            Prompts(
                prompt_tokens, hits, in_flight, limits, content_from, _held(held, len(requests))
            ),
            np.array([request is None or request.kind == "cross" for request in requests]),
            salt,
            borders,
            keys(borders.hashes, salt[borders.piece]),
            hashed.chain.tolist(),
            [bytes(piece[-rest:]) if (rest := len(piece) % width) else b"" for piece in pieces],
            anchors,
            keys(anchors.hashes, salt[anchors.piece]),
        )


_NOTHING: array[int] = array("Q")


def _held(pieces: list[tuple[int, int]], count: int) -> Ints | None:
    """The tokens of each of `count` pieces that another replica holds; None if it holds none."""
    if not pieces:
        return None
    held = np.zeros(count, np.int64)
    for piece, tokens in pieces:
        held[piece] = tokens
    return held


def _known_borders(end: Node, count: int, block_tokens: int) -> array[int]:
    """The first `count` hashes at the borders before a hit's `end`, as far as the tree has them.

    O(nodes without them above it).
    """
    node: Node | None = end
    while node is not None and node.borders is None:
        node = node.parent
    if node is None:
        return _NOTHING
    assert node.borders is not None
    # An edge that was cut by eviction may have grown anew.
    return node.borders[: min(count, node.end // block_tokens)]


def _keep(node: Node, count: int, known: array[int], hashed: Blocks, piece: int) -> None:
    """Stores the first `count` hashes in the node where the hit ended, if it has fewer."""
    if node.borders is None or count > len(node.borders):
        row = int(hashed.first_row[piece])
        fresh = hashed.hashes[row : row + count - len(known)]
        node.borders = known + array("Q", fresh.tobytes())
