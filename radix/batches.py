"""Requests that are processed together, and the hashes of all their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.radix.accounts import RequestAccount
from coppice.radix.anchors import AnchorFinder, Anchors
from coppice.radix.causes import Prompts
from coppice.radix.hashes import Blocks, Borders, Hashes, Ints, PrefixHasher, Tokens, keys
from coppice.radix.tokens import TOKEN_BYTES


class Growth:
    """Tokens that a request has added behind its prompt."""

    __slots__ = ("account", "added", "time")

    def __init__(self, account: RequestAccount, added: bytes, time: float) -> None:
        self.account = account
        self.added = added
        self.time = time


class Abandonment:
    """Only the first `computed` tokens of a request's prompt were ever computed."""

    __slots__ = ("account", "tokens", "computed")

    def __init__(self, account: RequestAccount, tokens: bytes, computed: int) -> None:
        self.account = account
        self.tokens = tokens
        self.computed = computed


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests and growths that are processed together, and the hashes of their tokens."""

    requests: list[RequestAccount | None]  # None: a growth
    lengths: Ints  # tokens that each used: its prompt, or what it has added
    times: NDArray[np.float64]
    prompts: Prompts
    cross: NDArray[np.bool_]
    salts: Hashes
    borders: Borders
    border_keys: Hashes
    chains: list[int]  # of each item, behind its last whole block
    tails: list[bytes]  # the tokens of each behind that
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
        for item in items:
            if isinstance(item, RequestAccount):
                tokens = item.tokens
                before = _known_borders(item, size) if item.node is not None else _NOTHING
                count = len(before)
                requests.append(item)
                known.append(before)
                chains.append(before[-1] if count else 0)
                pieces.append(memoryview(tokens)[count * width :] if count else tokens)
                prompt = item.prompt_tokens
                flat += (count, -1, item.hit_tokens, prompt, prompt, item.hit_tokens,
                         item.in_flight_tokens, item.hit_limit)  # fmt: skip
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
            np.array(flat, np.int64).reshape(-1, 8).T.copy()
        )
        hashed = self._prefixes.blocks(pieces, counts, np.array(chains, np.uint64), parents)
        for number, request in enumerate(requests):
            if request is not None and request.node is not None:
                _keep(request, known[number], hashed, number, size)
        borders = self._prefixes.borders(hashed, known)
        anchors = self._contents.find(pieces, (content_from - counts * size).tolist())
        salt = np.array(salts, np.uint64)
        return Batch(
            requests,
            lengths,
            np.array([item.time for item in items]),
            Prompts(prompt_tokens, hits, in_flight, limits, content_from),
            np.array([request is not None and request.kind == "cross" for request in requests]),
            salt,
            borders,
            keys(borders.hashes, salt[borders.piece]),
            hashed.chain.tolist(),
            [bytes(piece[len(piece) // width * width :]) for piece in pieces],
            anchors,
            keys(anchors.hashes, salt[anchors.piece]),
        )


_NOTHING: array[int] = array("Q")


def _known_borders(account: RequestAccount, block_tokens: int) -> array[int]:
    """The hashes at the borders up to the end of its hit, as far as the tree has them.

    O(nodes without them above the hit's end).
    """
    node = account.node
    while node is not None and node.borders is None:
        node = node.parent
    if node is None:
        return _NOTHING
    assert node.borders is not None
    # An edge that was cut by eviction may have grown anew; something of the prompt is always left.
    count = min(node.end, account.hit_tokens, account.prompt_tokens - 1) // block_tokens
    return node.borders[:count]


def _keep(
    account: RequestAccount, known: array[int], hashed: Blocks, piece: int, block_tokens: int
) -> None:
    """Leaves the hashes up to the end of the hit in the node where it ended."""
    node = account.node
    assert node is not None
    count = min(account.hit_tokens, account.prompt_tokens - 1) // block_tokens
    have = len(node.borders) if node.borders is not None else 0
    if count > have:
        row = int(hashed.first_row[piece])
        fresh = hashed.hashes[row : row + count - len(known)]
        node.borders = known + array("Q", fresh.tobytes())
