"""The disk's own: capacity, second chances, reopening, who has the folder, what it takes to run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tier_pages import PAGE_BYTES, ROOT, contents, line, numbered, put, right

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.disk.folder import FolderInUse, content, owner
from coppice.runtime.tiers.disk.index import Index
from coppice.runtime.tiers.disk.record import VERSION, record_bytes
from coppice.runtime.tiers.disk.store import DiskStore
from coppice.runtime.tiers.store import TierFailed

RECORD = record_bytes(16, PAGE_BYTES)
CAPACITY = 64 * RECORD  # 16 segments of 4 pages


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as opened:
        yield opened


def files(folder: Path) -> int:
    """Bytes of the segment files."""
    return sum(path.stat().st_size for path in content(folder).glob("*.kv"))


@pytest.mark.parametrize("error", [OSError("on purpose"), MemoryError(), KeyboardInterrupt()])
def test_a_folder_that_could_not_be_opened_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*given: object) -> Index:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("coppice.runtime.tiers.disk.store.open_index", fails)
        with pytest.raises(TierFailed if isinstance(error, OSError) else type(error)):
            DiskStore(tmp_path, CAPACITY, PAGE_BYTES)
    assert owner(tmp_path) is None
    DiskStore(tmp_path, CAPACITY, PAGE_BYTES).close()


def test_it_never_keeps_more_than_its_capacity(store: DiskStore, tmp_path: Path) -> None:
    keys = numbered(300)
    for begin in range(0, 300, 7):
        assert put(store, keys[begin : begin + 7]) == len(keys[begin : begin + 7])
        assert store.used == files(tmp_path) <= store.capacity
    there = right(store, keys)
    assert sum(there) >= 64 - 8
    assert all(there[-56:]), "the oldest went first"
    assert store.damaged == 0


def test_one_call_with_more_than_the_capacity_keeps_the_last(
    store: DiskStore, tmp_path: Path
) -> None:
    keys = numbered(200)
    assert put(store, keys) == 200
    assert files(tmp_path) <= CAPACITY
    assert all(right(store, keys)[-56:])


def test_pages_that_were_used_get_a_second_chance_and_no_third(store: DiskStore) -> None:
    hot, cold = numbered(2), numbered(300, b"they are all new")
    put(store, hot)
    assert right(store, hot) == [True, True]
    for key in cold[:100]:
        put(store, [key])
    there = [each is not None for each in store.find(hot + cold[:2])]
    assert there == [True, True, False, False]
    for key in cold[100:]:
        put(store, [key])
    assert [each is not None for each in store.find(hot)] == [False, False]


def test_pages_that_are_used_all_the_time_stay(store: DiskStore) -> None:
    """As many as fill half a segment."""
    hot = numbered(2)
    put(store, hot)
    for key in numbered(300, b"they are all new"):
        put(store, [key])
        assert right(store, hot) == [True] * 2
    hottest = store.hottest([ROOT], 3)
    assert {each.key for each in hottest} == set(hot)
    assert all(each.place.at.hits >= 299 for each in hottest)


def test_of_too_many_used_pages_those_used_last_stay(store: DiskStore) -> None:
    keys = numbered(4)
    put(store, keys)
    for key in (keys[2], keys[0], keys[3], keys[1]):
        right(store, [key])
        store.store([], np.empty((0, PAGE_BYTES), np.uint8))
    for key in numbered(70, b"they are all new"):
        put(store, [key])
    assert [each is not None for each in store.find(keys)] == [False, True, False, True]


def test_a_folder_of_pages_that_are_all_used_still_takes_new_ones(store: DiskStore) -> None:
    keys = numbered(60)
    put(store, keys)
    for key in numbered(100, b"they are all new"):
        right(store, keys)
        assert put(store, [key]) == 1
        assert right(store, [key]) == [True]
        assert store.used <= CAPACITY


@pytest.mark.parametrize("pages", [1, 2, 3, 17])
def test_a_folder_for_a_few_pages_works(tmp_path: Path, pages: int) -> None:
    with closing(DiskStore(tmp_path, pages * RECORD, PAGE_BYTES)) as store:
        for key in numbered(40):
            assert put(store, [key]) == 1
            assert right(store, [key]) == [True]
            assert files(tmp_path) <= pages * RECORD


def test_a_folder_for_no_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk_cache_size must be at least .* 1088 .*, got 1000"):
        DiskStore(tmp_path, 1000, PAGE_BYTES)
    assert not list(tmp_path.iterdir())


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    keys = numbered(50)
    for begin in range(0, 50, 10):
        with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
            put(store, keys[begin : begin + 10])
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        assert store.used == files(tmp_path)
        assert right(store, keys) == [True] * 50


def test_a_smaller_capacity_after_a_restart_holds_from_the_next_page_on(tmp_path: Path) -> None:
    keys = numbered(50)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        put(store, keys)
    with closing(DiskStore(tmp_path, 10 * RECORD, PAGE_BYTES)) as store:
        put(store, line(7, 7, 7, 7))
        assert store.used == files(tmp_path) <= 10 * RECORD


def test_pages_of_another_size_are_not_found_and_are_replaced(tmp_path: Path) -> None:
    keys = numbered(5)
    with closing(DiskStore(tmp_path, CAPACITY, 500)) as store:
        store.store(keys, contents(keys, 500))
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        assert store.find(keys) == [None] * 5
        assert store.find_longest(keys[0]) is None
        assert put(store, keys) == 5
        assert right(store, keys) == [True] * 5
        assert store.damaged == 0


def test_hits_outlive_the_process_and_give_chains_from_the_root(tmp_path: Path) -> None:
    long, short, unused = line(*range(12)), line(50, 51), line(60, 61, 62, 63)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        put(store, long + short + unused)
        right(store, short)
        store.store([], np.empty((0, PAGE_BYTES), np.uint8))
        right(store, long)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        hottest = store.hottest([ROOT], 10)
        assert [each.key for each in hottest] == long + short
        assert [each.above for each in hottest] == [-1, 0, 1, -1]
        assert all(each.root == ROOT for each in hottest)
        assert store.hottest([ROOT], 2) == hottest[:2]
        assert store.hottest([ROOT], 0) == []
        out = np.zeros((4, PAGE_BYTES), np.uint8)
        places = [each.place for each in hottest]
        assert store.load_ahead(long + short, places, out) == [True] * 4
        assert np.array_equal(out, contents(long + short))
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        found = [each.place.at.hits for each in store.hottest([ROOT], 10)]
        assert found == [1] * 4, "what nobody asked for was no use"


def test_the_hottest_pages_are_of_the_chains_that_were_named(store: DiskStore) -> None:
    ours, others = line(*range(8)), line(*range(8), root=b"another chain's.")
    put(store, ours + others)
    right(store, ours + others)
    store.store([], np.empty((0, PAGE_BYTES), np.uint8))
    named = store.hottest([others[0].parent], 10)
    assert [each.key for each in named] == others
    assert all(each.root == others[0].parent for each in named)
    assert len(store.hottest([ROOT, others[0].parent], 10)) == 4
    assert store.hottest([b"nobody's"], 10) == []


def test_of_chains_that_share_pages_the_hottest_come_first(store: DiskStore) -> None:
    """Each page after the one before it, and the more and later it was used the earlier."""
    chains = [line(0, 1, 2, 3, i, 5, 6, 7, 8) for i in range(10)]
    for keys in chains:
        put(store, keys)
    store.used_above(line(0, 1, 2, 3), 1)
    for times, keys in enumerate(chains):
        assert store.used_above(keys[1:], times) == []
    hottest = store.hottest([ROOT], 100)
    assert [each.key for each in hottest[:3]] == chains[9]
    assert [each.above for each in hottest[:5]] == [-1, 0, 1, 0, 3]
    assert [each.key for each in hottest[3:5]] == chains[8][1:]
    assert len(hottest) == 1 + 2 * 9
    assert store.hottest([ROOT], 4) == hottest[:4]


def test_a_clock_that_was_put_back_leaves_nothing_hottest_for_ever(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    often, later = line(1, 2), line(3, 4)
    put(store, often + later)
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**9 * 3600 * 24 * 365)
    store.used_above(later, 1)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    store.used_above(often, 9)
    assert [each.key for each in store.hottest([ROOT], 10)] == often + later


def test_what_was_dropped_is_told(store: DiskStore) -> None:
    keys, gone = numbered(200), set[bytes]()
    for begin in range(0, 200, 5):
        some = keys[begin : begin + 5]
        gone |= set(store.store(some, contents(some)).gone)
    there = store.find(keys)
    assert gone == {key.name for key, place in zip(keys, there, strict=True) if place is None}
    assert len(gone) > 100
    assert store.used_above(keys, 1) == [key for key in keys if key.name in gone]


def test_hits_above_keep_a_page_below(store: DiskStore) -> None:
    """As those that were loaded from here do; they outlive the process that does not end well."""
    hot = numbered(2)
    put(store, hot)
    for key in numbered(300, b"they are all new"):
        put(store, [key])
        assert store.used_above(hot, 3) == []
    with closing(Index(store._index._path, read_only=True)) as index:
        assert [each.hits for each in index.find(hot) if each is not None] == [900, 900]


HOLD = """
import sys
from coppice.runtime.tiers.disk.store import DiskStore
store = DiskStore(sys.argv[1], 2**20, 1000)
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert owner(content(tmp_path)) == str(child.pid)
        with pytest.raises(FolderInUse, match=rf"{tmp_path}.* in use by process {child.pid};"):
            DiskStore(tmp_path, CAPACITY, PAGE_BYTES)
        assert issubclass(FolderInUse, TierFailed)
    finally:
        child.kill()
        child.communicate()
    assert owner(content(tmp_path)) is None
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)):
        assert owner(content(tmp_path)) == str(os.getpid())
        with pytest.raises(FolderInUse):
            DiskStore(tmp_path, CAPACITY, PAGE_BYTES)
    assert owner(content(tmp_path)) is None


def test_a_look_at_who_has_a_folder_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    DiskStore(tmp_path, CAPACITY, PAGE_BYTES).close()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            owner(content(tmp_path))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(20):
            DiskStore(tmp_path, CAPACITY, PAGE_BYTES).close()
    finally:
        stop.set()
        looking.join()
    assert owner(content(tmp_path)) is None


def test_an_older_versions_pages_lie_beside_and_stay(tmp_path: Path) -> None:
    old = tmp_path / f"v{VERSION - 1}"
    old.mkdir()
    (old / "index.sqlite").write_bytes(b"another form")
    (old / "0000000001.kv").write_bytes(b"x" * 5000)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        put(store, numbered(3))
        assert right(store, numbered(3)) == [True] * 3
        assert store.used == files(tmp_path)
    assert (old / "index.sqlite").read_bytes() == b"another form"
    assert (old / "0000000001.kv").stat().st_size == 5000


def test_a_closed_store_says_so(store: DiskStore) -> None:
    put(store, numbered(1))
    store.close()
    with pytest.raises(TierFailed, match="closed"):
        store.find(numbered(1))
    store.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_and_memory_stay_bounded_over_many_operations(tmp_path: Path) -> None:
    """New segments all the time, and threads that come and go."""
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        keys = numbered(600)
        before, most = open_files(), 0
        for begin in range(0, 600, 10):
            some = keys[begin : begin + 10]
            put(store, some)
            reader = threading.Thread(target=right, args=(store, some))
            reader.start()
            reader.join()
            most = max(most, open_files())
        # Of each segment one descriptor, and a few of the index.
        assert most - before <= 16 + 2 + 12
        assert len(store._segments._sizes) <= 18
        assert len(store._hits) <= 10
        assert len(list(content(tmp_path).iterdir())) <= 18 + 4
    assert open_files() <= before


def test_hits_are_written_while_nothing_is_stored(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.runtime.tiers.disk.store._NOTED", 5)
    keys = numbered(12)
    put(store, keys)
    for key in keys:
        right(store, [key])
    assert len(store._hits) < 5
    assert len(store.hottest([ROOT], 100)) == 10


def test_readers_find_only_right_pages_while_others_are_written_and_dropped(
    store: DiskStore,
) -> None:
    """Pages move and go between `find` and `load`; none is counted as damaged."""
    keys = numbered(150)
    stop, faults, hits = threading.Event(), list[BaseException](), list[int]()

    def read() -> None:
        draw = np.random.default_rng(threading.get_ident() % 1000)
        try:
            while not stop.is_set():
                some: list[PageKey] = [keys[i] for i in draw.integers(0, len(keys), 8)]
                hits.append(sum(right(store, some)))
        except BaseException as error:
            faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for each in readers:
        each.start()
    try:
        for round_ in range(2):
            for begin in range(0, len(keys), 5):
                put(store, keys[begin : begin + 5])
            assert not faults, round_
    finally:
        stop.set()
        for each in readers:
            each.join()
    assert not faults
    assert sum(hits) > 0
    assert store.damaged == 0
