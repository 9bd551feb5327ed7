"""The page pool: runs of neighbours, reference counts, and refusals that change nothing."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coppice.radix import OutOfPages, PagePool


def state(pool: PagePool) -> object:
    return pool.refs.tobytes(), pool.free_pages, pool.free_runs()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (-1, 16), (16, 0), (16, -4)])
def test_a_pool_needs_a_page_and_a_slot(num_pages: int, page_size: int) -> None:
    name = "num_pages" if num_pages < 1 else "page_size"
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got"):
        PagePool(num_pages, page_size)


def test_a_pool_has_no_more_pages_than_links_can_name() -> None:
    with pytest.raises(ValueError, match="num_pages must be at most 1073741823, got 1073741824"):
        PagePool(1 << 30, 16)


def test_a_fresh_pool_hands_out_one_run() -> None:
    pool = PagePool(100, 16)
    assert list(pool.allocate(60)) == list(range(60))
    assert list(pool.allocate(40)) == list(range(60, 100))
    assert pool.free_pages == 0
    assert pool.free_runs() == []
    pool.check()


def test_allocating_nothing_takes_nothing() -> None:
    pool = PagePool(4, 1)
    before = state(pool)
    assert len(pool.allocate(0)) == 0
    assert len(pool.allocate(0, after=2)) == 0
    assert state(pool) == before
    pool.allocate(4)
    assert len(pool.allocate(0)) == 0, "even from an empty pool"


def test_after_continues_a_run() -> None:
    pool = PagePool(100, 16)
    first, other = pool.allocate(10), pool.allocate(10)
    pool.release(pool.allocate(30))
    # Page 10, after the first run, belongs to the other one; page 20, after that one, is free.
    assert list(pool.allocate(5, after=other[-1])) == [20, 21, 22, 23, 24]
    assert first[-1] + 1 == other[0]
    taken = pool.allocate(5, after=first[-1])
    assert list(taken) == list(range(taken[0], taken[0] + 5)), "a run, though elsewhere"
    pool.check()


def test_after_takes_what_there_is_and_the_rest_elsewhere() -> None:
    pool = PagePool(32, 16)
    pages = pool.allocate(32)
    pool.release(pages[4:7])
    pool.release(pages[16:32])
    assert list(pool.allocate(6, after=3)) == [4, 5, 6, 16, 17, 18]
    pool.check()


def test_after_the_last_page_there_is_none() -> None:
    pool = PagePool(8, 16)
    pool.release(pool.allocate(8)[:3])
    assert list(pool.allocate(2, after=7)) == [0, 1]
    pool.check()


@pytest.mark.parametrize("after", [-2, 8, 1000])
def test_after_must_be_a_page_of_the_pool(after: int) -> None:
    pool = PagePool(8, 16)
    before = state(pool)
    with pytest.raises(ValueError, match=rf"after must be -1 or a page, 0 .. 7, got {after}"):
        pool.allocate(1, after=after)
    assert state(pool) == before


def test_the_smallest_class_of_runs_that_fits_is_taken() -> None:
    pool = PagePool(64, 16)
    pages = pool.allocate(64)
    pool.release(pages[2:6])  # a run of 4
    pool.release(pages[20:40])  # a run of 20
    assert list(pool.allocate(4)) == [2, 3, 4, 5], "the long run stays whole"
    assert list(pool.allocate(16)) == list(range(20, 36))
    pool.check()


def test_scattered_pages_are_given_when_no_run_is_long_enough() -> None:
    pool = PagePool(16, 16)
    pages = pool.allocate(16)
    pool.release(pages[::2])
    assert pool.free_runs() == [(page, 1) for page in range(0, 16, 2)]
    assert sorted(pool.allocate(8)) == list(range(0, 16, 2))
    assert pool.free_pages == 0
    pool.check()


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_neighbours_are_joined_in_any_order_of_release(order: tuple[int, ...]) -> None:
    pool = PagePool(12, 16)
    parts = [pool.allocate(3), pool.allocate(4), pool.allocate(5)]
    for part in order:
        pool.release(parts[part])
        pool.check()
    assert pool.free_runs() == [(0, 12)]


def test_pages_out_of_order_come_back_as_runs() -> None:
    pool = PagePool(6, 16)
    pool.allocate(6)
    assert pool.release([5, 0, 1, 3, 2, 4]) == 6
    assert pool.free_runs() == [(0, 6)]
    pool.check()


def test_exhaustion_changes_nothing() -> None:
    pool = PagePool(10, 16)
    pool.allocate(7)
    before = state(pool)
    with pytest.raises(OutOfPages, match="4 pages are needed, 3 can be had") as caught:
        pool.allocate(4)
    assert (caught.value.needed, caught.value.available) == (4, 3)
    assert state(pool) == before
    assert len(pool.allocate(3)) == 3


def test_a_negative_count_is_refused() -> None:
    pool = PagePool(10, 16)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        pool.allocate(-1)


def test_a_page_returns_with_its_last_reference() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.share(pages)
    pool.share(pages[:1])
    assert pool.release(pages) == 0
    assert pool.release(pages) == 1
    assert (pool.refs[pages[0]], pool.free_pages) == (1, 3)
    assert pool.release(pages[:1]) == 1
    assert pool.free_runs() == [(0, 4)]
    pool.check()


@pytest.mark.parametrize("count", [4, 47, 48, 100], ids=lambda count: f"{count}_pages")
def test_a_double_release_is_refused_and_changes_nothing(count: int) -> None:
    """On both sides of the length from which releases are vectorised."""
    pool = PagePool(128, 16)
    pages = pool.allocate(count)
    pool.release(pages[-1:])
    before = state(pool)
    with pytest.raises(ValueError, match=f"pages: {pages[-1]} can't be released, it is free"):
        pool.release(pages)
    assert state(pool) == before
    assert pool.release(pages[:-1]) == count - 1
    pool.check()


def test_sharing_a_free_page_is_refused_and_changes_nothing() -> None:
    pool = PagePool(8, 16)
    pages = pool.allocate(3)
    before = state(pool)
    with pytest.raises(ValueError, match="pages: 3 can't be shared, it is free"):
        pool.share([*pages, 3])
    assert state(pool) == before


@pytest.mark.parametrize("count", [2, 60])
@pytest.mark.parametrize("stranger", [-1, 64, 2**30])
def test_a_page_of_no_pool_is_refused_and_changes_nothing(stranger: int, count: int) -> None:
    pool = PagePool(64, 16)
    pages = [*pool.allocate(count), stranger]
    pool.allocate(64 - count)  # so that page 63, which -1 could be taken for, is in use
    before = state(pool)
    with pytest.raises(ValueError, match=f"pages: {stranger} can't be released, the pool has"):
        pool.release(pages)
    with pytest.raises(ValueError, match=f"pages: {stranger} can't be shared, the pool has"):
        pool.share(pages)
    assert state(pool) == before


def test_a_free_page_is_refused_where_pages_equal_a_link() -> None:
    """The array of ids from which runs are copied also has the links of free runs."""
    pool = PagePool(16, 16)
    pages = pool.allocate(16)
    pool.release(pages[9:10])
    pool.release(pages[6:7])  # a run of one page, whose follower is the one at 9
    before = state(pool)
    with pytest.raises(ValueError, match="pages: 9 can't be released, it is free"):
        pool.release(array("i", [5, 9]))
    assert state(pool) == before
    assert pool.release(array("i", [5, 7])) == 2
    pool.check()


@pytest.mark.parametrize("count", [47, 48, 49, 500])
def test_many_pages_are_released_like_few(count: int) -> None:
    """Shared and scattered pages in one call; the same pages one by one as the yardstick."""
    many, single = PagePool(600, 16), PagePool(600, 16)
    rng = np.random.default_rng(count)
    pages = rng.permutation(many.allocate(600)[:count])
    single.allocate(600)
    shared = pages[rng.random(count) < 0.3].tolist()
    many.share(shared)
    single.share(shared)
    freed = many.release(array("i", pages.tolist()))
    assert freed == count - len(shared)
    assert freed == sum(single.release((page,)) for page in pages.tolist())
    assert state(many) == state(single)
    many.check()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain count of references for each page."""

    @initialize(num_pages=st.integers(1, 130))
    def begin(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, 16)
        self.references: Counter[int] = Counter()
        self.holders: list[list[int]] = []

    @rule(share=st.integers(0, 100), after=st.integers(-1, 130))
    def allocate(self, share: int, after: int) -> None:
        free = self.pool.free_pages
        count = share * (free + 2) // 100
        after = min(after, self.pool.num_pages - 1)
        before = state(self.pool)
        run = 0
        if after >= 0:
            run = next((n for start, n in self.pool.free_runs() if start == after + 1), 0)
        if count > free:
            with pytest.raises(OutOfPages):
                self.pool.allocate(count, after)
            assert state(self.pool) == before
            return
        pages = list(self.pool.allocate(count, after))
        assert len(pages) == len(set(pages)) == count
        assert not any(self.references[page] for page in pages), "a page in use was handed out"
        follow = list(range(after + 1, after + 1 + min(run, count)))
        assert pages[: len(follow)] == follow
        self.references.update(pages)
        if pages:
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), start=st.integers(0, 130))
    def share(self, which: int, start: int) -> None:
        pages = self.holders[which % len(self.holders)][start:]
        self.pool.share(array("i", pages))
        self.references.update(pages)
        if pages:
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), cut=st.integers(0, 130), reverse=st.booleans())
    def release(self, which: int, cut: int, reverse: bool) -> None:
        """Releases a part of the pages of a holder, which keeps the rest."""
        index = which % len(self.holders)
        pages, rest = self.holders[index][cut:], self.holders[index][:cut]
        self.holders[index : index + 1] = [rest] if rest else []
        if reverse:
            pages.reverse()
        self.references.subtract(pages)
        freed = self.pool.release(array("i", pages))
        assert freed == sum(1 for page in pages if not self.references[page])

    @precondition(lambda self: self.pool.free_pages)
    @rule(which=st.integers(0, 130), many=st.booleans())
    def release_too_often(self, which: int, many: bool) -> None:
        free = [page for page, count in enumerate(self.pool.refs) if count <= 0]
        stray = free[which % len(free)]
        used = [page for page, count in enumerate(self.pool.refs) if count > 0]
        before = state(self.pool)
        with pytest.raises(ValueError, match="pages"):
            self.pool.release([*used, stray] if many else [stray])
        with pytest.raises(ValueError, match="pages"):
            self.pool.share([*used, stray])
        assert state(self.pool) == before

    @invariant()
    def verify(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        counts = [self.references[page] for page in range(self.pool.num_pages)]
        assert [max(count, 0) for count in self.pool.refs] == counts
        assert self.pool.free_pages == counts.count(0)


def test_any_use_of_the_pool_agrees_with_plain_counts() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
