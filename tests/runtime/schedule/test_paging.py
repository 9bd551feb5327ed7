"""The batches in which pages are copied; the rest of paging is tested with the scheduler."""

from coppice.runtime.schedule.paging import PageCopy, copy_batches


def test_copies_are_made_in_order_where_pages_are_handed_on():
    copies = [PageCopy(1, 2), PageCopy(1, 3), PageCopy(4, 1), PageCopy(1, 5), PageCopy(6, 5)]
    batches = list(copy_batches(copies))
    assert batches == [copies[:2], copies[2:3], copies[3:4], copies[4:]]
    assert list(copy_batches([])) == []
