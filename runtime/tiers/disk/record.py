"""The form of one page in a segment file."""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from coppice.radix.mirror.names import NAME_BYTES, PageKey

#: Changes whenever files of an older version can't be read; they are put aside then.
VERSION = 1

MAGIC = b"cKVp"
# Magic, version, bytes of the tokens, bytes of the page, parent, checksum.
_HEADER = struct.Struct(f"<4sIII{NAME_BYTES}sQ")
HEADER_BYTES = _HEADER.size
#: Records begin at multiples of this in their file.
ALIGNMENT = 64


def head(key: PageKey, page: np.ndarray) -> bytes:
    """What lies before the bytes of a page: the header, its tokens, and zeros up to 64 bytes."""
    filled = _padded(HEADER_BYTES + len(key.tokens))
    header = _HEADER.pack(
        MAGIC, VERSION, len(key.tokens), len(page), key.parent, _checksum(key, page)
    )
    return (header + key.tokens).ljust(filled, b"\0")


def head_bytes(tokens: int) -> int:
    """The length of `head` for a page whose tokens have so many bytes."""
    return _padded(HEADER_BYTES + tokens)


def record_bytes(tokens: int, page_bytes: int) -> int:
    """Bytes of a whole record, a multiple of 64."""
    return head_bytes(tokens) + _padded(page_bytes)


def parse(data: bytes | memoryview) -> tuple[PageKey | None, int, int, int]:
    """(Key or None if the tokens are not all there, their bytes, the page's bytes, the checksum).

    Raises ValueError for what is no header.
    """
    if len(data) < HEADER_BYTES:
        raise ValueError("the file ends within a header")
    magic, version, tokens, page_bytes, parent, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ValueError("there is no header of this version")
    key = None
    if len(data) >= HEADER_BYTES + tokens:
        key = PageKey(parent, bytes(data[HEADER_BYTES : HEADER_BYTES + tokens]))
    return key, tokens, page_bytes, checksum


def is_right(data: bytes | memoryview, parent: bytes, tokens: bytes, page: np.ndarray) -> bool:
    """Whether `data` is the head of `page`, with every bit of both as it was written.

    The record must follow `parent` and its tokens begin with `tokens`.
    """
    try:
        found, _, page_bytes, checksum = parse(data)
    except ValueError:
        return False
    if found is None or page_bytes != len(page) or found.parent != parent:
        return False
    return found.tokens.startswith(tokens) and checksum == _checksum(found, page)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _checksum(key: PageKey, page: np.ndarray) -> int:
    state = xxhash.xxh3_64(key.parent)
    state.update(len(key.tokens).to_bytes(4, "little") + key.tokens)
    state.update(page.data)
    return state.intdigest()
