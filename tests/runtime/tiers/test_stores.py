"""Every store against a dict: random operations, reopening, pages that are not full."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from redis_server import RedisServer
from tier_pages import PAGE_BYTES, PAGE_TOKENS, content, contents, line, put, right

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.disk.store import DiskStore
from coppice.runtime.tiers.shared import SharedStore
from coppice.runtime.tiers.store import Place, Store

STORES = ["disk", "shared"]


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Callable[[], Store]:
    """Opens the store of that kind, with what it had when it was closed."""
    if kind == "disk":
        return lambda: DiskStore(tmp_path, 2**30, PAGE_BYTES)
    server: RedisServer = request.getfixturevalue("server")
    return lambda: SharedStore(server.url, PAGE_BYTES)


def agreeing(one: PageKey, other: PageKey) -> int:
    """Tokens with which two pages begin alike."""
    both = zip(np.frombuffer(one.tokens, np.int32), np.frombuffer(other.tokens, np.int32),
               strict=False)  # fmt: skip
    same = 0
    for ours, theirs in both:
        if ours != theirs:
            break
        same += 1
    return same


def expected_longest(key: PageKey, model: set[PageKey]) -> int:
    return max((agreeing(key, each) for each in model if each.parent == key.parent), default=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", STORES)
def test_random_operations_do_what_a_dict_does(opened: Callable[[], Store], seed: int) -> None:
    """Few tokens and short prompts, so that many pages share a parent, and many are not full."""
    draw = random.Random(seed)
    model: set[PageKey] = set()
    store = opened()

    def prompt() -> list[PageKey]:
        # Tokens whose bytes sort otherwise than their numbers.
        return line(*draw.choices((0, 1, 255, 256, 2**31 - 1), k=draw.randint(1, 4 * PAGE_TOKENS)))

    for _ in range(250):
        action = draw.random()
        keys = prompt()
        if action < 0.4:
            done = store.store(keys, contents(keys))
            assert (done.written, done.known) == (
                len([each for each in keys if each not in model]),
                len([each for each in keys if each in model]),
            )
            model.update(keys)
        elif action < 0.6:
            assert [place is not None for place in store.find(keys)] == [k in model for k in keys]
        elif action < 0.75:
            assert right(store, keys) == [each in model for each in keys]
        elif action < 0.97:
            key = draw.choice(keys)
            place = store.find_longest(key)
            longest = expected_longest(key, model)
            assert (place.tokens if place is not None else 0) == longest
            if place is not None:
                row = np.zeros((1, PAGE_BYTES), np.uint8)
                assert store.load([key], [place], row) == [True]
                fitting = [
                    content(each)
                    for each in model
                    if each.parent == key.parent and agreeing(each, key) == longest
                ]
                assert any(np.array_equal(row[0], each) for each in fitting)
        else:
            store.close()
            store = opened()
    assert right(store, list(model)) == [True] * len(model)
    assert store.damaged == 0
    store.close()


@pytest.mark.parametrize("kind", STORES)
def test_a_page_that_is_not_full_and_the_full_one_are_two(opened: Callable[[], Store]) -> None:
    part, full = line(1, 2, 3), line(1, 2, 3, 4)
    with closing(opened()) as store:
        assert put(store, part) == 1
        assert right(store, full) == [False]
        found = store.find_longest(full[0])
        assert found is not None
        assert found.tokens == 3
        assert put(store, full) == 1
        assert right(store, part + full) == [True, True]
        found = store.find_longest(line(1, 2, 3, 5)[0])
        assert found is not None
        assert found.tokens == 3


@pytest.mark.parametrize("kind", STORES)
def test_tokens_agree_or_not_as_tokens(opened: Callable[[], Store]) -> None:
    """Not as bytes: 256 and 512 have three of four bytes in common."""
    with closing(opened()) as store:
        put(store, line(1, 256, 7, 7))
        found = store.find_longest(line(1, 512, 7, 7)[0])
        assert found is not None
        assert found.tokens == 1
        assert store.find_longest(line(257, 256)[0]) is None
        assert store.find_longest(line(1, 256, root=b"another root    ")[0]) is None


@pytest.mark.parametrize("kind", STORES)
def test_a_page_twice_in_one_call_is_written_once(opened: Callable[[], Store]) -> None:
    with closing(opened()) as store:
        keys = line(1, 2, 3, 4) * 3
        done = store.store(keys, contents(keys))
        assert (done.written, done.known) == (1, 2)
        assert right(store, keys) == [True] * 3


@pytest.mark.parametrize("kind", STORES)
def test_nothing_is_an_answer_to_nothing(opened: Callable[[], Store]) -> None:
    with closing(opened()) as store:
        empty = np.empty((0, PAGE_BYTES), np.uint8)
        assert store.find([]) == []
        assert store.load([], [], empty) == []
        assert store.store([], empty).written == 0


@pytest.mark.parametrize("kind", STORES)
def test_a_place_of_a_page_that_is_gone_loads_nothing(
    opened: Callable[[], Store], kind: str
) -> None:
    """Nor is it counted as damaged; a page beside it loads."""
    keys = line(1, 2, 3, 4, 5, 6, 7, 8)
    with closing(opened()) as store:
        put(store, keys)
        places: list[Place] = [each for each in store.find(keys) if each is not None]
        if kind == "disk":
            gone = Place(places[0].tokens, places[0].at._replace(segment=77))
        else:
            gone = Place(4, line(9, 9, 9, 9)[0])
        out = np.zeros((2, PAGE_BYTES), np.uint8)
        assert store.load(keys, [gone, places[1]], out) == [False, True]
        assert np.array_equal(out[1], content(keys[1]))
        assert store.damaged == 0
        assert right(store, keys) == [True, True]
