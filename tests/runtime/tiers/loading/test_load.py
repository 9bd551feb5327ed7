"""What a sequence takes over, computes, and waits for, while its pages come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.loading.load import FoundPage, Load, Next
from coppice.runtime.tiers.loading.rates import Rate, meeting, worth
from coppice.runtime.tiers.sizes import parse_size
from coppice.runtime.tiers.store import Place

SIZE = 4


def found(tokens: int = SIZE, tier: int = 0) -> FoundPage:
    return FoundPage(tier, PageKey(b"parent", bytes(4 * tokens)), Place(tokens, None))


def loading(pages: dict[int, FoundPage], computed: int = 0, together: bool = False) -> Load:
    load = Load(SimpleNamespace(computed=computed), computed, SIZE, 0.0, True)
    load.finding = False
    load.together = together
    load.found(pages)
    return load


def come(load: Load, most: int = 2, right: bool | list[bool] = True) -> list[int]:
    """The next piece is read; returns the indices of its pages."""
    piece = load.piece([most] * 2)
    assert piece is not None
    rights = right if isinstance(right, list) else [right] * len(piece.pages)
    load.came(piece, torch.zeros(len(piece.pages), 1), rights)
    return list(range(piece.first, piece.first + len(piece.pages)))


def step(load: Load, count: int = 100, most: int = 50) -> Next:
    return load.next(load.sequence.computed, count, most)


def test_it_waits_for_what_comes_and_takes_it_over_in_order():
    load = loading({index: found() for index in range(1, 6)}, computed=4)
    assert step(load) == (0, 0), "a thread is about to read it"
    assert come(load) == [1, 2]
    assert step(load) == (8, 0)
    assert step(load, most=1) == (4, 0)
    assert [each.row for each in load.take(4, 8)] == [0, 1]
    load.sequence.computed = 12
    assert step(load) == (0, 0)
    assert come(load, most=9) == [3, 4, 5]
    load.take(12, step(load).ready)
    load.sequence.computed = 24
    assert load.over
    assert step(load) == (0, 100)


def test_a_partly_filled_page_ends_what_is_taken_over():
    load = loading({0: found(), 1: found(3)})
    come(load)
    assert step(load) == (7, 0)
    load = loading({0: found(3), 1: found()}, computed=2)
    come(load)
    assert step(load) == (1, 0)


def test_what_is_damaged_or_missing_is_computed():
    load = loading({0: found(), 2: found(), 3: found()})
    assert come(load) == [0]
    load.take(0, 4)
    load.sequence.computed = 4
    assert step(load) == (0, 4), "page 1 is not there, page 2 is"
    assert come(load, right=[False, True]) == [2, 3]
    assert step(load) == (0, 8), "page 2 was damaged"
    load.sequence.computed = 12
    assert step(load) == (4, 0)


def test_the_beginning_is_computed_while_the_end_comes_until_they_meet():
    load = loading({index: found() for index in range(10)}, together=True)
    load.load_rate = load.compute_rate = 100.0
    assert step(load, count=40) == (0, 20), "the middle, as both are as fast"
    assert come(load) == [8, 9]
    load.sequence.computed = 8
    assert step(load, count=32) == (0, 12), "of the 24 tokens between them"
    assert come(load, most=5) == [5, 6, 7], "what lies before the middle will be computed"
    assert step(load, count=32) == (0, 8)
    assert load.piece([1]) is not None, "page 4"
    load.sequence.computed = 16
    assert step(load, count=24) == (0, 0), "it is being read"
    load.give_up()
    assert step(load, count=24) == (0, 4)
    load.sequence.computed = 20
    assert step(load, count=20) == (20, 0)


def test_what_was_computed_meanwhile_is_not_read():
    load = loading({index: found() for index in range(4)})
    load.sequence.computed = 9
    assert come(load, most=9) == [2, 3]
    load.sequence.computed = 16
    assert step(load) == (0, 100)
    assert load.over


def test_pieces_are_of_one_tier_and_of_neighbours():
    load = loading({0: found(), 1: found(tier=1), 2: found(tier=1), 5: found(tier=1)})
    pieces = [load.piece([9, 9]) for _ in range(4)]
    assert [(each.tier, each.first, len(each.pages)) for each in pieces if each] == [
        (0, 0, 1), (1, 1, 2), (1, 5, 1),
    ]  # fmt: skip
    assert pieces[3] is None
    assert load.pieces == 3 and not load.over


def test_nothing_is_decided_while_tiers_are_asked():
    load = Load(SimpleNamespace(computed=0), 0, SIZE, 0.0, True)
    assert step(load) == (0, 0) and not load.over
    load.give_up()
    assert load.over and step(load) == (0, 100)


def test_loading_is_compared_with_computing():
    assert worth(1.0, None).loads
    fast = worth(1.0, 10.0)
    assert fast.loads and not fast.together and fast.seconds == 9.0
    equal = worth(1.0, 1.0)
    assert equal.loads and equal.together and equal.seconds == pytest.approx(0.5)
    assert not worth(20.0, 1.0).loads
    assert meeting(100, 1.0, 1.0) == 50
    assert meeting(100, 3.0, 1.0) == 25


def test_a_rate_follows_what_is_measured():
    rate = Rate(100.0)
    assert rate.value == 100.0 and rate.patience(100) == 4.0
    assert rate.patience(1) == 1.0, "nothing was measured"
    for _ in range(20):
        rate.observe(1000, 1.0)
    assert rate.value == pytest.approx(1000)
    assert rate.patience(1) == 0.2
    for _ in range(30):
        rate.observe(1000, 10.0)
    assert rate.value == pytest.approx(100, rel=0.05)


def test_of_a_tier_that_is_not_read_a_little_more_is_expected_each_time():
    rate = Rate(1000.0)
    rate.declined()
    assert rate.value == 1000.0, "nothing is known of it"
    rate.observe(100, 1.0)
    for _ in range(5):
        rate.declined()
    assert rate.value == pytest.approx(100 * 1.1**5)
    for _ in range(1000):
        rate.declined()
    assert rate.value == 1000.0, "no more than of one of which nothing is known"
    rate.observe(100, 1.0)
    assert rate.value == pytest.approx(100), "one measurement says more than hope"


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("500MB", 500_000_000), ("1.5 GiB", 3 * 2**29), ("7", 7), (9, 9),
     ("2kib", 2048), ("3 T", 3 * 10**12)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size("disk_cache_size", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", 0, -5, True, 1.5, None, "12 apples"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="disk_cache_size must be a size such as 64GiB"):
        parse_size("disk_cache_size", text)
