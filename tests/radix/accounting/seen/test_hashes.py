"""Hashes of prefixes: equal for equal tokens, in any batch and from any known border on."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from coppice.radix.accounting.seen.hashes import PrefixHasher, keys, namespace_salt
from coppice.radix.tokens import TOKEN_BYTES


def text(seed: int, count: int, vocabulary: int = 32_000) -> bytes:
    return np.random.default_rng(seed).integers(0, vocabulary, count, np.int32).tobytes()


def prefixes(hasher: PrefixHasher, pieces: list[bytes]) -> list[list[tuple[int, int]]]:
    """End and key of each block of each piece, all beginning at position 0."""
    zeros = np.zeros(len(pieces), np.int64)
    blocks = hasher.blocks(pieces, zeros, zeros.astype(np.uint64), zeros - 1)
    found = keys(blocks.hashes, np.uint64(0)).tolist()
    rows = [[] for _ in pieces]
    for piece, end, key in zip(blocks.piece.tolist(), blocks.end.tolist(), found, strict=True):
        rows[piece].append((end, key))
    return rows


@pytest.mark.parametrize("size", [2, 16, 128])
def test_equal_prefixes_have_equal_hashes_in_any_batch(size: int) -> None:
    hasher = PrefixHasher(size)
    shared = text(1, 5 * size)
    pieces = [shared + text(2, 3), text(3, 1), shared + text(4, 2 * size), shared, text(5, 70_000)]
    rows = prefixes(hasher, pieces)
    assert rows == [prefixes(hasher, [piece])[0] for piece in pieces]
    assert rows[0][:5] == rows[2][:5] == rows[3]
    ends = [end for end, _ in rows[2]]
    assert ends == [size * number for number in range(1, 8)]
    assert rows[0][-1][0] == 5 * size + 3
    distinct = {row for piece in rows for row in piece}
    assert len({key for _, key in distinct}) == len(distinct)


def test_every_token_counts_for_all_later_borders() -> None:
    hasher = PrefixHasher(16)
    tokens = np.frombuffer(text(1, 100), np.int32)
    plain = prefixes(hasher, [tokens.tobytes()])[0]
    for place in range(100):
        for changed in (tokens[place] ^ 1, 0):
            other = tokens.copy()
            other[place] = changed
            if changed == tokens[place]:
                continue
            found = prefixes(hasher, [other.tobytes()])[0]
            differing = [end for (end, ours), (_, theirs) in zip(plain, found, strict=True)
                         if ours != theirs]  # fmt: skip
            assert differing == [end for end, _ in plain if end > place]


def test_order_and_length_count() -> None:
    hasher = PrefixHasher(16)
    a, b = text(1, 16), text(2, 16)
    assert prefixes(hasher, [a + b])[0][1] != prefixes(hasher, [b + a])[0][1]
    zeros = [bytes(TOKEN_BYTES * count) for count in range(1, 40)]
    found = [rows[-1][1] for rows in prefixes(hasher, zeros)]
    assert len(set(found)) == len(found)


def test_a_later_piece_continues_a_prefix() -> None:
    hasher = PrefixHasher(16)
    whole = text(1, 100)
    expected = prefixes(hasher, [whole])[0]
    head, tail = whole[: 40 * TOKEN_BYTES], whole[32 * TOKEN_BYTES :]
    none = np.zeros(1, np.uint64)
    first = hasher.blocks([head], np.array([0]), none, np.array([-1]))
    for chains, parents, pieces in (
        (np.array([int(first.chain[0])], np.uint64), [-1], [tail]),
        (np.zeros(2, np.uint64), [-1, 0], [head, tail]),
    ):
        begins = [0, 2][-len(pieces) :]
        blocks = hasher.blocks(pieces, np.array(begins), chains, np.array(parents))
        last = blocks.piece == len(pieces) - 1
        found = keys(blocks.hashes[last], np.uint64(0)).tolist()
        assert list(zip(blocks.end[last].tolist(), found, strict=True)) == expected[2:]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_block_tokens_are_even(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_tokens must be even and at least 2, got {size}"):
        PrefixHasher(size)


# -- borders -------------------------------------------------------------------------------------


def test_prefixes_are_remembered_at_all_borders_first_and_at_one_of_eight_then() -> None:
    hasher = PrefixHasher(4)
    pieces = [text(1, 4 * 60 + 3), text(2, 4 * 50), text(3, 2)]
    zeros = np.zeros(3, np.int64)
    blocks = hasher.blocks(pieces, zeros, zeros.astype(np.uint64), zeros - 1)
    borders = hasher.borders(blocks, [array("Q")] * 3)
    rows = {piece: borders.end[borders.piece == piece].tolist() for piece in range(3)}
    first = list(range(4, 129, 4))
    assert rows[0] == [*first, 160, 192, 224, 243]
    assert rows[1] == [*first, 160, 192, 200]
    assert rows[2] == [2]
    assert borders.first_row.tolist() == [0, len(rows[0]), len(rows[0]) + len(rows[1])]
    every = dict(zip(zip(blocks.piece, blocks.end, strict=True), blocks.hashes, strict=True))
    kept = zip(borders.piece, borders.end, borders.hashes, strict=True)
    assert all(every[piece, end] == found for piece, end, found in kept)


def test_what_is_known_of_a_prefix_need_not_be_hashed() -> None:
    hasher = PrefixHasher(4)
    whole = [text(1, 4 * 60 + 3), text(2, 30)]
    zeros = np.zeros(2, np.int64)
    none = zeros.astype(np.uint64)
    blocks = hasher.blocks(whole, zeros, none, zeros - 1)
    expected = hasher.borders(blocks, [array("Q")] * 2)
    for count in (1, 31, 40, 43, 60):
        known = array("Q", blocks.hashes[:count].tobytes())
        rest = hasher.blocks(
            [whole[0][count * 16 :], whole[1]],
            np.array([count, 0]),
            np.array([known[-1], 0], np.uint64),
            zeros - 1,
        )
        found = hasher.borders(rest, [known, array("Q")])
        ours = set(zip(found.piece.tolist(), found.end.tolist(), found.hashes.tolist(),
                       strict=True))  # fmt: skip
        theirs = set(zip(expected.piece.tolist(), expected.end.tolist(), expected.hashes.tolist(),
                         strict=True))  # fmt: skip
        assert theirs <= ours, count
        assert {row[1] for row in ours - theirs} <= {4 * count}
        assert (np.diff(found.piece) >= 0).all()


# -- keys ----------------------------------------------------------------------------------------


def test_salts_keep_namespaces_apart() -> None:
    names = [None, 0, 1, "a", ("a", "b"), ("ab", ""), ("", "ab")]
    salts = {namespace_salt(name) for name in names}
    assert len(salts) == len(names)
    assert 0 not in salts
    hashes = np.arange(1000, dtype=np.uint64)
    found = {key for salt in salts for key in keys(hashes, np.uint64(salt)).tolist()}
    assert len(found) == 1000 * len(names)
    assert all(key & 0xFFFFFFFF for key in found)
