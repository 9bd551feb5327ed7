"""After a start the garbage collector is as before, and the new objects are old."""

from __future__ import annotations

import gc

import pytest

from coppice.runtime.startup.garbage import without_collecting


def test_new_objects_are_old_afterwards_and_still_collected() -> None:
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
    assert gc.collect() > 0, "a cycle is found among the old objects"


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
