"""Tokens as int32 bytes, and their longest common prefix."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.radix.tokens import TOKEN_BYTES, common_prefix, token_bytes

IDS = [0, 1, 255, 256, 128_000, 2**31 - 1]
PACKED = array("i", IDS).tobytes()


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        iter(IDS),
        PACKED,
        bytearray(PACKED),
        array("i", IDS),
        array("q", IDS),
        array("I", IDS),
        np.array(IDS, np.int32),
        np.array(IDS, np.int64),
        np.array(IDS, np.uint32),
        np.repeat(np.array(IDS), 2)[::2],
        [np.int64(token) for token in IDS],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_kind_of_tokens_gives_the_same_bytes(tokens: object) -> None:
    packed = token_bytes(tokens)  # type: ignore[arg-type]
    assert type(packed) is bytes
    assert packed == PACKED
    assert len(packed) == TOKEN_BYTES * len(IDS)


@pytest.mark.parametrize("tokens", [[], (), b"", bytearray(), array("i"), np.array([], np.int32)])
def test_no_tokens_are_no_bytes(tokens: object) -> None:
    assert token_bytes(tokens) == b""  # type: ignore[arg-type]


def test_bytes_of_a_bytearray_do_not_change_with_it() -> None:
    growing = bytearray(PACKED)
    packed = token_bytes(growing)
    growing[:4] = b"\0\0\0\1"
    assert packed == PACKED


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([-1], "-1"),
        ([3, -7, 5], "-7"),
        (array("i", [3, -7]), "-7"),
        (np.array([3, -7]), "-7"),
        ([2**31], "2\\*\\*31 - 1"),
        (np.array([2**40]), "2\\*\\*31 - 1"),
        (array("q", [2**31]), "2\\*\\*31 - 1"),
        ([1.0], "integer"),
        (np.array([1.5]), "integer"),
        (array("f", [1.0]), "integer"),
        (np.array([[1, 2], [3, 4]]), "integer"),
        (["1"], "integer"),
        ("abc", "integer"),
        ([None], "integer"),
        (None, "integer"),
        (7, "integer"),
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused_by_name(tokens: object, named: str) -> None:
    with pytest.raises(ValueError, match=rf"tokens: .*{named}"):
        token_bytes(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 4 * 100 + 1])
def test_a_broken_number_of_bytes_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"tokens: {count} bytes are no whole number"):
        token_bytes(bytes(count))
    with pytest.raises(ValueError, match=f"tokens: {count} bytes are no whole number"):
        token_bytes(bytearray(count))


def naive(a: list[int], b: list[int]) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same


# Ids that differ in one byte only, at either end of the four, and neighbours.
TOKEN = st.sampled_from([0, 1, 2, 256, 1 << 24, (1 << 24) + 1, 2**31 - 1])


@given(st.lists(TOKEN, max_size=400), st.lists(TOKEN, max_size=40), st.lists(TOKEN, max_size=40),
       st.lists(TOKEN, max_size=9))  # fmt: skip
@settings(max_examples=300, deadline=None, derandomize=True)
def test_common_prefix_agrees_with_a_plain_loop(
    shared: list[int], a: list[int], b: list[int], before: list[int]
) -> None:
    x, y = shared + a, shared + b
    expected = TOKEN_BYTES * naive(x, y)
    offset = TOKEN_BYTES * len(before)
    assert common_prefix(token_bytes(before + x), offset, token_bytes(y)) == expected
    assert common_prefix(token_bytes(before + y), offset, token_bytes(x)) == expected


LONG = 100_000
# Block borders of the galloping search, and everything near the ends.
PLACES = sorted(
    {
        0,
        1,
        2,
        63,
        64,
        65,
        319,
        320,
        321,
        1343,
        1344,
        50_000,
        LONG - 65,
        LONG - 64,
        LONG - 2,
        LONG - 1,
    }
    | set(random.Random(0).sample(range(LONG), 40))
)


@pytest.mark.parametrize("byte", [0, 3])
@pytest.mark.parametrize("offset", [0, 7])
def test_common_prefix_finds_one_difference_in_a_long_line(offset: int, byte: int) -> None:
    rng = random.Random(1)
    line = array("i", (rng.randrange(1 << 30) for _ in range(LONG))).tobytes()
    before = bytes(TOKEN_BYTES * offset)
    for place in PLACES:
        other = bytearray(line)
        other[place * TOKEN_BYTES + byte] ^= 1
        found = common_prefix(before + line, len(before), bytes(other))
        assert found == place * TOKEN_BYTES, place


def test_common_prefix_of_long_lines_of_different_length() -> None:
    line = array("i", range(LONG)).tobytes()
    for length in PLACES:
        cut = line[: length * TOKEN_BYTES]
        assert common_prefix(line, 0, cut) == len(cut)
        assert common_prefix(cut, 0, line) == len(cut)
        # One that ends, and one that differs where the other ends.
        assert common_prefix(cut + b"\xff\xff\xff\x7f", 0, line) == len(cut)
    assert common_prefix(line, 0, line) == len(line)


def test_the_second_difference_does_not_matter() -> None:
    """Periodic lines: halving must not be fooled by blocks that are equal after the difference."""
    line = array("i", [1, 2, 3, 4] * (LONG // 4)).tobytes()
    for place in PLACES:
        other = bytearray(line)
        for at in (place, min(place + 3, LONG - 1), LONG - 1):
            other[at * TOKEN_BYTES] = 99
        assert common_prefix(line, 0, bytes(other)) == place * TOKEN_BYTES, place


def test_common_prefix_of_nothing() -> None:
    assert common_prefix(b"", 0, PACKED) == 0
    assert common_prefix(PACKED, 0, b"") == 0
    assert common_prefix(PACKED, len(PACKED), PACKED) == 0
