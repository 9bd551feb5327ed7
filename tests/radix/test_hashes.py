"""Hashes of prefixes and of content: equal for equal tokens, wherever the borders fall."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.radix.hashes import ContentCutter, PrefixHasher, keys, namespace_salt
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


# -- content -------------------------------------------------------------------------------------


def chunks(cutter: ContentCutter, pieces: list[bytes]) -> list[list[tuple[int, int, int]]]:
    """Start, length and hash of the chunks of each piece."""
    cut = cutter.chunks(pieces, [0] * len(pieces))
    rows = [[] for _ in pieces]
    columns = (cut.piece, cut.start, cut.length, cut.hashes)
    for piece, *row in zip(*(column.tolist() for column in columns), strict=True):
        rows[piece].append(tuple(row))
    return rows


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_chunks_cover_each_piece_and_do_not_depend_on_the_others(size: int) -> None:
    cutter = ContentCutter(size)
    pieces = [text(1, 20_000), b"", text(2, 5), text(3, 1), text(4, 3000), b""]
    rows = chunks(cutter, pieces)
    for piece, row in zip(pieces, rows, strict=True):
        at = 0
        for start, length, _ in row:
            assert start == at
            assert length > 0
            at += length
        assert at == len(piece) // TOKEN_BYTES
    assert 0.7 * size < 20_000 / len(rows[0]) < 1.7 * size
    assert min(length for _, length, _ in rows[0][1:-1]) >= size // 8
    for piece, row in zip(pieces, rows, strict=True):
        assert chunks(ContentCutter(size), [piece])[0] == row
    assert chunks(cutter, [b""]) == [[]]


@pytest.mark.parametrize("vocabulary", [50, 1000, 128_000])
def test_an_insertion_moves_the_chunks_behind_it(vocabulary: int) -> None:
    cutter = ContentCutter(32)
    content = text(1, 5000, vocabulary)
    plain = chunks(cutter, [content])[0]
    for inserted in (1, 7, 1000):
        moved = chunks(cutter, [text(9, inserted, vocabulary) + content])[0]
        kept = {(start - inserted, length, key) for start, length, key in moved} & set(plain)
        assert sum(length for _, length, _ in kept) > 4800


def test_a_skipped_beginning_is_left_out() -> None:
    cutter = ContentCutter(32)
    content = text(1, 500)
    cut = cutter.chunks([content, content], [0, 123])
    whole = cutter.chunks([content[123 * TOKEN_BYTES :]], [0])
    second = cut.piece == 1
    assert cut.hashes[second].tolist() == whole.hashes.tolist()
    assert cut.start[second].tolist() == whole.start.tolist()


def test_chunks_of_other_content_or_length_differ() -> None:
    cutter = ContentCutter(16)
    pieces = [text(seed, count, 8) for seed in range(40) for count in (1, 5, 9, 40)]
    distinct = set(pieces)
    rows = chunks(cutter, sorted(distinct))
    # Whole pieces of one chunk each are told apart.
    single = [row[0] for row in rows if len(row) == 1]
    tokens = [piece for piece, row in zip(sorted(distinct), rows, strict=True) if len(row) == 1]
    assert len({key for _, _, key in single}) == len(set(tokens))


def test_chunk_tokens_are_checked() -> None:
    for size in (0, 4, 24, 256):
        with pytest.raises(ValueError, match=f"chunk_tokens must be a power .* got {size}"):
            ContentCutter(size)


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
