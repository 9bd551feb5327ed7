"""Tokens as contiguous int32 bytes, and their longest common prefix at memcmp speed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

TOKEN_BYTES = 4
"""Bytes of one token: tokens are native-endian int32."""

Tokens = bytes | bytearray | array | np.ndarray | Iterable[int]

# Blocks of up to this many bytes are compared as one big integer each: their lowest differing bit
# is in the first token that differs, which no Python loop over tokens has to find.
_XOR_BYTES = 256


def token_bytes(tokens: Tokens) -> bytes:
    """The tokens as native int32 bytes, four a token; `bytes` are taken as they are.

    O(n). Raises ValueError for ids outside 0 .. 2**31 - 1 and for bytes that are no whole number
    of tokens.
    """
    if type(tokens) is bytes and not len(tokens) % TOKEN_BYTES:
        return tokens
    if isinstance(tokens, (bytes, bytearray)):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(
                f"tokens: {len(tokens)} bytes are no whole number of int32 tokens "
                f"(a multiple of {TOKEN_BYTES} is needed)"
            )
        return bytes(tokens)
    if isinstance(tokens, array) and tokens.typecode == "i":
        packed = tokens
    else:
        try:
            packed = array("i", tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
        except (OverflowError, TypeError) as error:
            raise ValueError(
                f"tokens: token ids must be integers in 0 .. 2**31 - 1 ({error})"
            ) from None
    if packed and (least := int(np.frombuffer(packed, np.int32).min())) < 0:
        raise ValueError(f"tokens: token ids must be in 0 .. 2**31 - 1, got {least}")
    return packed.tobytes()


def common_prefix(a: bytes, offset: int, b: bytes) -> int:
    """Length in bytes, a multiple of four, of the longest common prefix of `a[offset:]` and `b`.

    Gallops: blocks of growing size are compared by memcmp until one differs, then that block is
    halved. O(length of the common prefix), at memory speed.
    """
    limit = min(len(a) - offset, len(b))
    same, step = 0, _XOR_BYTES
    while same < limit:
        if a[offset + same : offset + same + step] != b[same : same + step]:
            break
        same += step
        step *= 4
    else:
        return limit
    # The slices may differ only because one of the two ended, so bound the block by both.
    high = min(same + step, limit)
    while high - same > _XOR_BYTES:
        middle = (same + high) // 2
        if a[offset + same : offset + middle] == b[same:middle]:
            same = middle
        else:
            high = middle
    difference = int.from_bytes(a[offset + same : offset + high], "little") ^ int.from_bytes(
        b[same:high], "little"
    )
    if difference:
        same += ((difference & -difference).bit_length() - 1) >> 3
    else:
        same = high
    return same & -TOKEN_BYTES
