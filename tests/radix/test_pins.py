"""Pins keep prefixes, within a budget, until they are unpinned or unused for too long."""

from __future__ import annotations

from array import array

import pytest
from sequences import serve

from coppice.radix import POLICIES, Hold, PagePool, PinRefused, Pins, RadixTree, check


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def recount(tree: RadixTree, pins: Pins) -> None:
    holds: list[tuple[Hold, array[int]]] = [
        (pin.hold, array("i")) for pin in pins if pin.hold is not None
    ]
    check(tree, holds)
    assert pins.locked_pages() == tree.locked_pages


def fixture(pages: int = 8, budget: float = 0.5) -> tuple[RadixTree, Pins, Clock]:
    tree, clock = RadixTree(PagePool(pages, 4)), Clock()
    return tree, Pins(tree, budget, clock), clock


def test_a_pinned_prefix_outlives_everything_else() -> None:
    tree, pins, _ = fixture()
    serve(tree, list(range(10)))
    pins.pin("handbook", range(6))
    assert [pin.cached_tokens for pin in pins] == [6]
    for request in range(10):
        serve(tree, list(range(100 * request + 100, 100 * request + 120)))
        recount(tree, pins)
    assert tree.match(range(10)).length == 6, "the pinned tokens, and no more of that path"
    assert pins.unpin("handbook")
    assert not pins.unpin("handbook")
    serve(tree, list(range(5000, 5032)))
    assert tree.match(range(10)).length == 0
    recount(tree, pins)


def test_what_is_not_computed_yet_is_kept_once_it_is() -> None:
    tree, pins, _ = fixture()
    pin = pins.pin("handbook", range(9))
    assert pin.cached_tokens == 0
    serve(tree, list(range(5)))
    assert pins.refresh() == []
    assert pin.cached_tokens == 5
    serve(tree, list(range(12)))
    pins.refresh()
    assert pin.cached_tokens == 9
    recount(tree, pins)


def test_a_pin_is_neither_a_hit_nor_a_use() -> None:
    tree, pins, _ = fixture()
    serve(tree, [1, 2, 3, 4])
    serve(tree, [5, 6, 7, 8])
    pins.pin("first", [1, 2, 3, 4])
    pins.unpin("first")
    assert all(node.hits == 0 for node in tree.nodes())
    tree.evict(1)
    assert tree.match([1, 2, 3, 4]).length == 0, "still the least recently used"


def test_time_to_live_is_refreshed_by_use() -> None:
    tree, pins, clock = fixture()
    serve(tree, list(range(8)))
    pins.pin("short", range(8), ttl=10)
    clock.now += 9
    serve(tree, list(range(8)))
    assert pins.refresh() == []
    clock.now += 9
    assert pins.refresh() == []
    clock.now += 1
    assert pins.refresh() == ["short"]
    assert len(pins) == 0
    recount(tree, pins)


def test_use_of_a_part_only_does_not_refresh() -> None:
    tree, pins, clock = fixture()
    serve(tree, list(range(8)))
    pins.pin("whole", range(8), ttl=10)
    clock.now += 9
    serve(tree, [0, 1, 2, 3, 99])
    clock.now += 1
    assert pins.refresh() == ["whole"]


def test_a_sequence_uses_a_pin_for_as_long_as_it_runs() -> None:
    tree, pins, clock = fixture()
    serve(tree, list(range(8)))
    pins.pin("short", range(8), ttl=10)
    pins.pin("longer", range(4), ttl=10)
    hold, table = tree.start(tree.match(range(8)))
    for _ in range(5):
        clock.now += 9
        assert pins.refresh() == []
    tree.release(hold, table)
    clock.now += 9
    assert pins.refresh() == []  # the end of the sequence was a use, seen just now
    clock.now += 10
    assert pins.refresh() == ["short", "longer"], "neither keeps the other"
    recount(tree, pins)


def test_a_pin_whose_time_has_passed_is_not_in_the_way() -> None:
    """Nor is it renewed by its name, though `refresh` was not called since."""
    tree, pins, clock = fixture()
    serve(tree, list(range(16)))
    pins.pin("old", range(16), ttl=10)
    clock.now += 11
    pins.pin("new", range(100, 116))
    assert [each.name for each in pins] == ["new"] and pins.promised_pages() == 4
    pins.unpin("new")
    pins.pin("old", range(16), ttl=10)
    clock.now += 11
    pin = pins.pin("old", range(20, 24))
    assert pin.cached_tokens == 0, "the name is free for another prefix"
    recount(tree, pins)


def test_the_budget_counts_shared_pages_once_and_refuses_by_name() -> None:
    _, pins, _ = fixture(pages=8, budget=0.5)
    pins.pin("a", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])  # 3 pages
    pins.pin("b", [0, 1, 2, 3, 4, 5, 6, 7])  # nothing more
    assert pins.promised_pages() == 3
    with pytest.raises(PinRefused, match="pin 'c' needs 2 pages more, but 3 of the 4 pages"):
        pins.pin("c", [0, 1, 2, 3, 4, 5, 0, 0, 0])  # its own second page, and a third
    pins.pin("d", [0, 1, 2, 3, 4, 5, 0, 0])
    assert pins.promised_pages() == 4
    assert {pin.name for pin in pins} == {"a", "b", "d"}
    with pytest.raises(PinRefused, match="there is a pin named 'a' already"):
        pins.pin("a", [9])
    pins.unpin("a")
    assert pins.promised_pages() == 3


def test_namespaces_do_not_share_pins() -> None:
    tree, pins, _ = fixture()
    serve(tree, [1, 2, 3, 4], "left")
    serve(tree, [1, 2, 3, 4], "right")
    pins.pin("left", [1, 2, 3, 4], "left")
    assert pins.promised_pages() == 1
    serve(tree, list(range(100, 128)))
    assert tree.match([1, 2, 3, 4], "left").length == 4
    assert tree.match([1, 2, 3, 4], "right").length == 0


def test_bad_arguments_are_refused() -> None:
    tree, pins, _ = fixture()
    with pytest.raises(ValueError, match="budget must be a fraction of the pool"):
        Pins(tree, 1.5)
    with pytest.raises(ValueError, match="at least one token"):
        pins.pin("empty", [])
    for ttl in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="ttl must be more than 0 seconds"):
            pins.pin("never", [1], ttl=ttl)
    assert len(pins) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_eviction_and_reset_leave_pins_alone(policy: str) -> None:
    tree, clock = RadixTree(PagePool(8, 4), policy), Clock()
    pins = Pins(tree, 0.5, clock)
    serve(tree, list(range(20)))
    pins.pin("half", range(10))
    assert tree.evict(100) == 2
    with pytest.raises(RuntimeError, match="reset: refused"):
        tree.reset()
    assert tree.match(range(20)).length == 10
    for request in range(20):
        serve(tree, list(range(100 * request + 100, 100 * request + 120)))
        pins.refresh()
        assert tree.match(range(20)).length == 10
        recount(tree, pins)
    assert pins.unpin("half") and not pins.unpin("half") and not pins.unpin("other")
    tree.reset()


def test_clear_ends_all_so_that_the_tree_can_be_reset() -> None:
    tree, pins, _ = fixture()
    serve(tree, [1, 2, 3, 4])
    pins.pin("one", [1, 2, 3, 4])
    with pytest.raises(RuntimeError, match="reset: refused"):
        tree.reset()
    pins.clear()
    tree.reset()
    assert tree.cached_tokens == 0
