"""The garbage collector is as it was after a start, and what has come is old."""

from __future__ import annotations

import gc

import pytest

from coppice.runtime.startup.garbage import without_collecting


def test_what_has_come_is_old_and_is_still_collected() -> None:
    class Node:
        pass

    with without_collecting():
        assert not gc.isenabled()
        nodes = [Node() for _ in range(100)]
        nodes[0].circle = nodes[0]  # type: ignore[attr-defined]
    assert gc.isenabled() and gc.get_freeze_count() == 0
    oldest = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in oldest for each in nodes)
    del nodes
    assert gc.collect() > 0, "a circle is found among the old"


def test_the_users_choice_stays() -> None:
    gc.disable()
    try:
        with without_collecting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), without_collecting():
        raise KeyError
    assert gc.isenabled()
    gc.freeze()
    try:
        with without_collecting():
            pass
        assert gc.get_freeze_count() > 0, "what the user has frozen is not thawed"
    finally:
        gc.unfreeze()
