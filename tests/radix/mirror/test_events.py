"""Page hashes and events: a consumer that applies all events mirrors the tree's full pages."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array

import pytest
import xxhash
from sequences import serve

from coppice.radix import (
    Namespace,
    PageEvents,
    PagePool,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    RadixTree,
    check,
    page_hashes,
)


class Mirror:
    """A router's picture of one engine: hashes of the pages that it can hit."""

    def __init__(self, tree: RadixTree) -> None:
        self.size = tree.page_size
        self.pages: dict[int, tuple[int, bytes]] = {}

    def apply(self, events: list) -> None:
        for event in events:
            if isinstance(event, PagesCleared):
                self.pages.clear()
            elif isinstance(event, PagesRemoved):
                for page in event.hashes:
                    del self.pages[page]
            else:
                assert isinstance(event, PagesStored)
                assert len(event.tokens) == 4 * self.size * len(event.hashes)
                parent = event.parent_hash
                for index, page in enumerate(event.hashes):
                    assert page not in self.pages, "stored twice"
                    width = 4 * self.size
                    self.pages[page] = (parent, event.tokens[width * index : width * (index + 1)])
                    parent = page


def expected(tree: RadixTree, namespaces: list[Namespace | None], seed: int = 0) -> set[int]:
    """Hashes of all full pages in the tree, from the tokens of its paths."""
    found: set[int] = set()
    for namespace in namespaces:
        root = tree.roots.get(namespace)
        if root is not None:
            for node in root.subtree():
                found.update(page_hashes(node.prefix(), tree.page_size, namespace, seed=seed))
    return found


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("limit", [3, 10_000])
def test_a_removed_event_matches_each_stored_event(page_size: int, limit: int) -> None:
    rng = random.Random(page_size)
    tree = RadixTree(PagePool(64 // page_size, page_size))
    namespaces = [None, Namespace("m", cache_salt="s")]
    serve(tree, [1, 2, 3, 1, 2, 3, 1, 2])
    events, mirror = PageEvents(tree, limit=limit, seed=7), Mirror(tree)
    for step in range(600):
        if rng.random() < 0.8:
            tokens = [rng.randint(1, 2) for _ in range(rng.randint(1, 24))]
            serve(tree, tokens, rng.choice(namespaces))
        elif rng.random() < 0.95:
            tree.evict(rng.randint(1, 5))
        else:
            tree.reset()
        if step % 3 == 0:
            mirror.apply(events.drain())
            assert set(mirror.pages) == expected(tree, namespaces, seed=7)
    mirror.apply(events.drain())
    tree.evict(tree.evictable_pages)
    mirror.apply(events.drain())
    assert not mirror.pages
    assert (events.restarts > 0) == (limit == 3)


def test_a_split_emits_nothing() -> None:
    tree = RadixTree(PagePool(16, 4))
    events = PageEvents(tree)
    serve(tree, list(range(12)))
    (stored,) = events.drain()
    assert isinstance(stored, PagesStored)
    assert stored.hashes == tuple(page_hashes(range(12), 4))
    assert stored.tokens == array("i", range(12)).tobytes()
    hold = tree.lock(tree.match(range(6)))  # ends inside the edge, and inside a page
    assert tree.num_nodes == 2
    assert events.drain() == []
    tree.unlock(hold)
    tree.evict(16)
    removed = [page for event in events.drain() for page in event.hashes]
    assert sorted(removed) == sorted(stored.hashes)


def test_a_page_in_two_chunks_is_stored_when_it_is_full() -> None:
    tree = RadixTree(PagePool(16, 4))
    events = PageEvents(tree)
    hold, table = tree.lock(tree.match([])), tree.allocate(3)
    tree.insert(hold, range(6), table)
    tree.insert(hold, range(7), table)
    tree.insert(hold, range(9), table)
    tree.release(hold, table)
    stored = events.drain()
    assert [event.hashes for event in stored] == [
        tuple(page_hashes(range(4), 4)),
        tuple(page_hashes(range(8), 4)[1:]),
    ]
    assert stored[1].parent_hash == stored[0].hashes[0]


def test_hashes_are_equal_in_every_process() -> None:
    code = (
        "from coppice.radix import Namespace, page_hashes; "
        "print(list(page_hashes(range(8), 4, Namespace('m', None, 'salt'), seed=3)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = page_hashes(range(8), 4, Namespace("m", None, "salt"), seed=3)
    assert ran.stdout.strip() == str(list(here))


def test_prefixes_namespaces_and_seeds_have_different_hashes() -> None:
    plain = page_hashes([1, 2, 3, 4], 2)
    assert len(page_hashes([1, 2, 3], 2)) == 1, "a page that is not full has none"
    assert plain[:1] == page_hashes([1, 2, 9, 9], 2)[:1]
    assert plain[1] != page_hashes([9, 9, 3, 4], 2)[1]
    keys = [
        Namespace("ab", "c"),
        Namespace("a", "bc"),
        Namespace("ab", None, "c"),
        Namespace("ab", "", "c"),
    ]
    others = [page_hashes([1, 2], 2, key)[0] for key in keys]
    others += [plain[0], page_hashes([1, 2], 2, seed=1)[0]]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("namespace", ["salt", ("m", 1), 7, Namespace("m", cache_salt=5)])
def test_a_namespace_without_a_hash_is_refused_before_anything_changes(namespace: object) -> None:
    tree = RadixTree(PagePool(16, 4))
    match = tree.match([1, 2, 3, 4, 5], namespace)
    events = PageEvents(tree)
    for begin in (tree.lock, tree.start):
        with pytest.raises(ValueError, match="namespace"):
            begin(match)
    assert not tree.roots and tree.pool.free_pages == 16
    check(tree)
    events.close()
    serve(tree, [1, 2, 3, 4, 5], namespace)
    with pytest.raises(ValueError, match="namespace"):
        PageEvents(tree)
    assert not tree.listeners
    tree.reset()
    PageEvents(tree)


def test_a_sequence_locked_before_the_stream_is_stored_in_it() -> None:
    """The namespace is there before the stream, but no token of it is."""
    tree = RadixTree(PagePool(16, 4))
    namespace = Namespace("m", cache_salt="\ud800")  # half of a pair: no text, but a key
    hold = tree.lock(tree.match([], namespace))
    events = PageEvents(tree)
    tree.finish(hold, range(8), tree.allocate(2))
    (stored,) = events.drain()
    assert stored.namespace == namespace
    assert stored.hashes == tuple(page_hashes(range(8), 4, namespace))


def test_evicted_namespaces_leave_nothing() -> None:
    tree = RadixTree(PagePool(16, 4))
    events = PageEvents(tree)
    for number in range(200):
        serve(tree, list(range(9)), Namespace("m", cache_salt=str(number)))
        events.drain()
    assert len(tree.roots) <= 16
    tree.reset()
    assert not tree.roots
    serve(tree, list(range(9)), Namespace("m"))
    assert events.drain()[0] == PagesCleared()


def test_nothing_is_hashed_without_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, each page is hashed once, when it is full, and each namespace, when drained."""
    calls = []
    digest = xxhash.xxh3_64_intdigest

    def counting(content: bytes, seed: int) -> int:
        calls.append(len(content))
        return digest(content, seed)

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", counting)
    tree, namespace = RadixTree(PagePool(16, 4)), Namespace("m")
    for number in range(20):
        serve(tree, [number, *range(20)], namespace)
    tree.reset()
    assert not calls
    events = PageEvents(tree)
    serve(tree, list(range(18)), namespace)
    assert not calls
    events.drain()
    assert len(calls) == 1 + 4
    serve(tree, list(range(25)), namespace)
    events.drain()
    assert len(calls) == 1 + 4 + 2
    tree.unlock(tree.lock(tree.match(range(10), namespace)))  # splits
    tree.evict(5)
    events.drain()
    assert len(calls) == 1 + 4 + 2
    events.close()
    serve(tree, list(range(40)), namespace)
    assert len(calls) == 1 + 4 + 2


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        page_hashes([1], 0)
    with pytest.raises(ValueError, match="namespace must be a Namespace or None"):
        page_hashes([1], 1, "salt")
    tree = RadixTree(PagePool(4, 4))
    with pytest.raises(ValueError, match="limit must be at least 1"):
        PageEvents(tree, limit=0)
    events = PageEvents(tree)
    with pytest.raises(ValueError, match="a stream of events already"):
        PageEvents(tree)
    events.close()
    serve(tree, [1, 2, 3, 4, 5])
    PageEvents(tree).close()
