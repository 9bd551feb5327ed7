"""When a growing mark was passed, with a past that gets coarser."""

from __future__ import annotations

import pytest

from coppice.radix.accounting.timeline import Timeline


def test_a_mark_is_passed_when_one_as_high_is_reached() -> None:
    timeline = Timeline()
    assert timeline.time_of(0) is None
    timeline.record(3, 10.0)
    timeline.record(7, 11.0)
    timeline.record(7, 12.0)
    timeline.record(5, 13.0)
    assert [timeline.time_of(mark) for mark in (0, 3, 4, 7, 8)] == [10.0, 10.0, 11.0, 11.0, None]


def test_the_past_gets_coarser_but_never_wrong_by_much() -> None:
    timeline = Timeline(limit=100)
    for mark in range(10_000):
        timeline.record(mark, float(mark))
        assert len(timeline) <= 100
    for mark in range(9_950, 10_000):
        assert timeline.time_of(mark) == mark
    for mark in range(0, 10_000, 7):
        found = timeline.time_of(mark)
        assert found is not None
        assert mark <= found <= mark + max(1, 10_000 - mark)


def test_time_does_not_go_back() -> None:
    timeline = Timeline()
    timeline.record(1, 5.0)
    with pytest.raises(ValueError, match=r"time must not go backwards, got 4\.0 after 5\.0"):
        timeline.record(2, 4.0)
    with pytest.raises(ValueError, match="limit must be at least 4, got 3"):
        Timeline(3)
