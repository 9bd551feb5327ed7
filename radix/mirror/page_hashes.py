"""Page hashes: names for cached pages that mean the same in every process, for routers and events.

The hash of page i of a prompt identifies all its tokens up to the page's end: it is the xxh3 hash
of the hash before it and the page's own tokens, and the chain begins with a hash of the namespace.
Only full pages have one.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable

import xxhash

from coppice.radix.namespace import encode_namespace
from coppice.radix.tokens import TOKEN_BYTES, Tokens, token_bytes


def root_hash(namespace: Hashable, seed: int) -> int:
    """What the chain of a namespace begins with: the parent hash of its first pages."""
    return xxhash.xxh3_64_intdigest(encode_namespace(namespace), seed)


def extend_chain(parent: int, tokens: bytes, page_size: int, seed: int) -> array[int]:
    """The hashes (uint64) of the full pages of `tokens` (int32 bytes), which follow `parent`'s."""
    step = page_size * TOKEN_BYTES
    hashes = array("Q")
    for begin in range(0, len(tokens) - step + 1, step):
        page = tokens[begin : begin + step]
        parent = xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + page, seed)
        hashes.append(parent)
    return hashes


def page_hashes(
    tokens: Tokens, page_size: int, namespace: Hashable = None, *, seed: int = 0
) -> array[int]:
    """The hash (uint64) of each full page of a prompt, in order. O(tokens).

    A router compares them with the events of its engines (`PageEvents`) to find the one that has
    most of a prompt cached. Equal for equal arguments in every process. Raises ValueError for a
    page size below 1, bad tokens, and namespaces that are neither None nor a `Namespace`.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    return extend_chain(root_hash(namespace, seed), token_bytes(tokens), page_size, seed)
