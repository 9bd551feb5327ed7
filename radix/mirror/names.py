"""Names of pages that mean the same in every process and after a restart: chains of tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import xxhash

from coppice.radix.namespace import encode_namespace
from coppice.radix.tokens import TOKEN_BYTES

NAME_BYTES = 16


class PageKey(NamedTuple):
    """A page's tokens, and the name of all tokens before them.

    Attributes:
        parent: name of the page before it, or the root's for the first page.
        tokens: of the page, int32 bytes; a page at the end of a prompt may have fewer than the page
            size.
    """

    parent: bytes
    tokens: bytes

    @property
    def name(self) -> bytes:
        """The name of this page: all tokens up to its end, 128 bits of xxh3. O(tokens)."""
        return xxhash.xxh3_128_digest(self.parent + self.tokens)

    @property
    def length(self) -> int:
        """Tokens of the page."""
        return len(self.tokens) // TOKEN_BYTES


def root_name(digest: bytes, namespace: Hashable) -> bytes:
    """What the chain of a namespace begins with.

    `digest` stands for all that numbers depend on beside tokens and namespace. Two namespaces, or
    two digests, share no name. Raises ValueError for a namespace that has no encoding.
    """
    return xxhash.xxh3_128_digest(
        len(digest).to_bytes(8, "little") + digest + encode_namespace(namespace)
    )


Salt = Callable[[bytes], bytes | None]
"""What the numbers of a page depend on beside namespace and tokens, by its tokens.

b"" for most pages; None: neither this page nor what follows it has a name.
"""


def salted(parent: bytes, salt: bytes) -> bytes:
    """The name that a page follows whose numbers depend on `salt`; `parent` if that is b""."""
    return xxhash.xxh3_128_digest(parent + salt) if salt else parent


def chain(parent: bytes, tokens: bytes, page_bytes: int, salt: Salt | None = None) -> list[PageKey]:
    """The pages of `tokens` (int32 bytes), which follow the page that `parent` names.

    `page_bytes` are those of a full page's tokens; the last page may have fewer. They end before
    the first that has no name by `salt`. O(tokens).
    """
    digest, keys = xxhash.xxh3_128_digest, list[PageKey]()
    for begin in range(0, len(tokens), page_bytes):
        page = tokens[begin : begin + page_bytes]
        if salt is not None and (more := salt(page)) != b"":
            if more is None:
                break
            parent = salted(parent, more)
        keys.append(PageKey(parent, page))
        parent = digest(parent + page)
    return keys
