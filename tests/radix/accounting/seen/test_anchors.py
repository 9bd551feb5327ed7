"""Anchors: as a plain search finds them, and the same for the same content at any offset."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.radix.accounting.seen.anchors import FINE_TOKENS, MEAN_GAP, REACH, WINDOW, AnchorFinder
from coppice.radix.tokens import TOKEN_BYTES


def text(seed: int, count: int, vocabulary: int = 32_000) -> bytes:
    return np.random.default_rng(seed).integers(0, vocabulary, count, np.int32).tobytes()


def find(finder: AnchorFinder, pieces: list[bytes]) -> list[list[tuple[int, int, int]]]:
    """Start, length and hash of the anchors of each piece."""
    found = finder.find(pieces, [0] * len(pieces))
    rows: list[list[tuple[int, int, int]]] = [[] for _ in pieces]
    columns = (found.piece, found.start, found.length, found.hashes)
    for piece, start, length, key in zip(*(each.tolist() for each in columns), strict=True):
        rows[piece].append((start, length, key))
    return rows


def expected(tokens: bytes) -> list[int]:
    """The anchors of a text by a plain search."""
    low = [token & 255 for token in np.frombuffer(tokens, np.int32).tolist()]
    mixed = [token * 0x2D & 255 ^ before for before, token in zip([0, *low], low, strict=False)]
    return [
        at
        for at, byte in enumerate(mixed[: len(mixed) - WINDOW + 1])
        if byte < (3 if at >= FINE_TOKENS else 255)
        and byte < min([255, *mixed[max(0, at - REACH) : at]])
        and byte <= min([255, *mixed[at + 1 : at + 1 + REACH]])
    ]


@pytest.mark.parametrize("vocabulary", [8, 300, 128_000])
def test_anchors_are_local_minima(vocabulary: int) -> None:
    finder = AnchorFinder()
    sizes = [
        0,
        1,
        WINDOW - 1,
        WINDOW,
        30,
        100,
        500,
        FINE_TOKENS - 1,
        64,
        5000,
        2056,
        2055,
        2070,
        9000,
    ]
    pieces = [text(seed, count, vocabulary) for seed, count in enumerate(sizes)]
    for piece, row in zip(pieces, find(finder, pieces), strict=True):
        starts = [start for start, _, _ in row]
        assert starts == expected(piece)
        ends = [*starts[1:], len(piece) // TOKEN_BYTES] if starts else []
        assert [start + length for start, length, _ in row] == ends


def test_the_other_pieces_make_no_difference() -> None:
    finder = AnchorFinder()
    sizes = [100, 5, 40_000, 33, 9, 70_000, 3000, 3000, 30_000, 30_000, 0, 20_000]
    pieces = [text(seed, count) for seed, count in enumerate(sizes)]
    rows = find(finder, pieces)
    assert rows == [find(AnchorFinder(), [piece])[0] for piece in pieces]
    assert find(finder, []) == []
    assert find(finder, [b"", b""]) == [[], []]


def test_far_from_the_beginning_a_quarter_is_kept() -> None:
    finder = AnchorFinder()
    content = text(1, 60_000)
    starts = [start for start, _, _ in find(finder, [content])[0]]
    near = sum(start < FINE_TOKENS for start in starts)
    assert near == pytest.approx(FINE_TOKENS / MEAN_GAP, rel=0.2)
    assert len(starts) - near == pytest.approx((60_000 - FINE_TOKENS) / MEAN_GAP / 4, rel=0.1)
    # What is kept far away is kept near by as well.
    later = {key for start, _, key in find(finder, [content])[0] if start >= 10_000}
    alone = find(finder, [content[10_000 * TOKEN_BYTES :]])[0]
    assert len(later - {key for _, _, key in alone}) <= 1


@pytest.mark.parametrize("vocabulary", [300, 32_000, 128_000])
def test_shared_text_of_100_tokens_has_common_anchors(vocabulary: int) -> None:
    finder = AnchorFinder()
    common = []
    for seed in range(0, 1200, 4):
        shared = text(seed, 100, vocabulary)
        ours = text(seed + 1, 57, vocabulary) + shared + text(seed + 2, 40, vocabulary)
        theirs = text(seed + 3, 400, vocabulary) + shared
        first, second = ({key for _, _, key in row} for row in find(finder, [ours, theirs]))
        common.append(len(first & second))
    assert min(common) >= 1
    assert sum(count >= 3 for count in common) > 0.85 * len(common)


def test_a_skipped_beginning_is_left_out() -> None:
    finder = AnchorFinder()
    content = text(1, 500)
    found = finder.find([content, memoryview(content)], [0, 123])
    whole = finder.find([content[123 * TOKEN_BYTES :]], [0])
    second = found.piece == 1
    assert found.hashes[second].tolist() == whole.hashes.tolist()
    assert found.start[second].tolist() == whole.start.tolist()


def test_text_that_repeats_itself_has_few() -> None:
    finder = AnchorFinder()
    for period in (1, 2, REACH // 2, REACH):
        assert len(find(finder, [text(1, period) * 200])[0]) <= 2, period


def test_windows_of_other_content_have_other_hashes() -> None:
    finder = AnchorFinder()
    rows = find(finder, [text(seed, 2000) for seed in range(50)])
    found = [key for row in rows for _, _, key in row]
    assert len(set(found)) == len(found) > 3000
