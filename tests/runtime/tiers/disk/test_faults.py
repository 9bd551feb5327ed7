"""What a disk, a user and the end of a process can do to a folder: never a wrong page."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from tier_pages import PAGE_BYTES, contents, line, numbered, put, right
from tier_pages import ROOT as ROOT_NAME

from coppice.runtime.tiers.disk.folder import content
from coppice.runtime.tiers.disk.record import VERSION, record_bytes
from coppice.runtime.tiers.disk.store import DiskStore
from coppice.runtime.tiers.store import TierFailed

HELPERS = Path(__file__).parents[2] / "helpers"
RECORD = record_bytes(16, PAGE_BYTES)
CAPACITY = 640 * RECORD  # 16 segments of 40 pages
ROOT = os.geteuid() == 0


def filled(folder: Path, count: int = 100) -> None:
    """A folder with pages, a new segment after every 20."""
    for begin in range(0, count, 20):
        with closing(DiskStore(folder, CAPACITY, PAGE_BYTES)) as store:
            put(store, numbered(count)[begin : min(begin + 20, count)])


def segments(folder: Path) -> list[Path]:
    return sorted(content(folder).glob("*.kv"))


WRITE = """
import sys
from tier_pages import PAGE_BYTES, contents, numbered
from coppice.runtime.tiers.disk.store import DiskStore
store = DiskStore(sys.argv[1], int(sys.argv[2]), PAGE_BYTES)
keys = numbered(100000)
for begin in range(0, len(keys), 3):
    store.store(keys[begin : begin + 3], contents(keys[begin : begin + 3]))
    print(begin + 3, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_nothing_stored_is_lost_when_the_process_is_killed(tmp_path: Path, seed: int) -> None:
    """Killed at any time while it writes; what it had stored is found again, and right."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path), str(2**30)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HELPERS)},
    )
    try:
        assert child.stdout is not None
        for _ in range(20):
            child.stdout.readline()
        time.sleep(random.Random(seed).random() / 20)
    finally:
        child.kill()
        rest, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL
    stored = max([60, *map(int, rest.split(b"\n")[:-1])])
    with closing(DiskStore(tmp_path, 2**30, PAGE_BYTES)) as store:
        there = right(store, numbered(stored + 3))
        assert all(there[:stored])
        assert store.damaged == 0
        assert put(store, numbered(stored + 30)) >= 27
        assert all(right(store, numbered(stored + 30)))


def test_it_is_killed_while_it_makes_room(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path), str(32 * RECORD)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HELPERS)},
    )
    try:
        assert child.stdout is not None
        for _ in range(30):
            child.stdout.readline()
    finally:
        child.kill()
        rest, _ = child.communicate()
    stored = max([90, *map(int, rest.split(b"\n")[:-1])])
    with closing(DiskStore(tmp_path, 32 * RECORD, PAGE_BYTES)) as store:
        assert all(right(store, numbered(stored))[-24:])
        assert store.damaged == 0
        put(store, numbered(100, b"they are all new"))
        assert store.used <= 32 * RECORD


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of its own, with so many bytes."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    if not ROOT or subprocess.run(["mount", *options, folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_costs_the_oldest_pages(tmp_path: Path) -> None:
    """The folder may have more than the disk has: it lives on what there is."""
    keys = numbered(1500)
    with (
        small_disk(tmp_path / "disk", 2**20) as disk,
        closing(DiskStore(disk, 2**21, PAGE_BYTES)) as store,
    ):
        failed = 0
        for begin in range(0, len(keys), 5):
            try:
                put(store, keys[begin : begin + 5])
            except TierFailed:
                failed += 1
                right(store, keys[begin : begin + 5])
            else:
                assert all(right(store, keys[begin : begin + 5]))
        assert failed < 30
        assert all(right(store, keys[-20:]))
        assert store.damaged == 0


def test_a_disk_that_others_have_filled_fails_and_works_again(tmp_path: Path) -> None:
    keys = numbered(400)
    with (
        small_disk(tmp_path / "disk", 2**20) as disk,
        closing(DiskStore(disk / "cache", 2**19, PAGE_BYTES)) as store,
    ):
        put(store, keys[:50])
        rest = os.statvfs(disk)
        (disk / "others").write_bytes(b"x" * (rest.f_bavail * rest.f_frsize))
        failed = 0
        for begin in range(50, 400, 5):
            try:
                put(store, keys[begin : begin + 5])
            except TierFailed:
                failed += 1
            right(store, keys[: begin + 5])
        assert failed < 70, "it gives up old pages for new ones"
        assert store.damaged == 0
        (disk / "others").unlink()
        put(store, keys[:300])
        assert all(right(store, keys[:300]))
    assert store.used <= 2**19


def test_a_folder_on_a_full_disk_is_opened_or_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:
        with closing(DiskStore(disk / "cache", 2**19, PAGE_BYTES)) as store:
            put(store, numbered(50))
        rest = os.statvfs(disk)
        (disk / "others").write_bytes(b"x" * (rest.f_bavail * rest.f_frsize))
        with suppress(TierFailed), closing(DiskStore(disk / "cache", 2**19, PAGE_BYTES)) as store:
            assert all(right(store, numbered(50)))
        (disk / "others").unlink()
        with closing(DiskStore(disk / "cache", 2**19, PAGE_BYTES)) as store:
            assert all(right(store, numbered(50)))


def test_a_file_that_may_not_grow_fails_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The system's limit of a file's size, as a disk that takes only part of a record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    keys = numbered(300)
    try:
        with closing(DiskStore(tmp_path, 2**30, PAGE_BYTES)) as store:
            put(store, keys[:40])
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 * RECORD + 500, hard))
            for begin in range(40, 100, 10):
                put(store, keys[begin : begin + 10])
            with pytest.raises(TierFailed, match=r"disk_cache: .* can't be written"):
                put(store, keys[100:])
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            there = right(store, keys)
            assert sum(there) == 100
            assert store.used == sum(path.stat().st_size for path in segments(tmp_path))
            assert store.used == 100 * RECORD
            put(store, keys)
            assert all(right(store, keys))
            assert store.damaged == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_segment_that_became_a_folder_costs_its_pages(tmp_path: Path) -> None:
    filled(tmp_path)
    segments(tmp_path)[2].unlink()
    segments(tmp_path)[-1].unlink()
    (content(tmp_path) / "0000000003.kv").mkdir()
    (content(tmp_path) / "0000000005.kv").mkdir()
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        there = right(store, numbered(100))
        assert there == [i // 20 in (0, 1, 3) for i in range(100)]
        assert [each is not None for each in store.find(numbered(100))] == there
        put(store, numbered(100))
        assert all(right(store, numbered(100)))


def test_a_segment_that_becomes_a_folder_meanwhile_costs_its_pages(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        segments(tmp_path)[0].unlink()
        (content(tmp_path) / "0000000001.kv").mkdir()
        assert right(store, numbered(100)) == [i >= 20 for i in range(100)]
        assert store.damaged == 20


def test_a_folder_that_vanishes_fails_or_misses(tmp_path: Path) -> None:
    filled(tmp_path / "cache")
    with closing(DiskStore(tmp_path / "cache", CAPACITY, PAGE_BYTES)) as store:
        (tmp_path / "cache").rename(tmp_path / "elsewhere")
        out = np.zeros((100, PAGE_BYTES), np.uint8)
        with suppress(TierFailed):
            places = store.find(numbered(100))
            loaded = store.load(numbered(100), [p for p in places if p is not None], out)
            assert not any(loaded)
        with pytest.raises(TierFailed):
            put(store, line(5, 5, 5))


def opened_by_nobody(folder: Path) -> str:
    """What another user is told who opens the folder."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            DiskStore(folder, CAPACITY, PAGE_BYTES)
            os.write(writing, b"opened")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as said:
        text = said.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


@pytest.mark.skipif(not ROOT, reason="only root can become another user")
@pytest.mark.parametrize("what", ["unreadable", "unwritable", "of another user"])
def test_a_folder_without_permission_is_refused(tmp_path: Path, what: str) -> None:
    """As another user, since root may do everything."""
    folder = tmp_path / "cache"
    if what == "of another user":
        filled(folder)
    else:
        folder.mkdir(mode=0o700 if what == "unreadable" else 0o755)
    for each in (tmp_path, *tmp_path.parents):
        if each.owner() == "root" and each != Path("/"):
            if each.stat().st_mode & 0o001:
                break
            each.chmod(each.stat().st_mode | 0o011)
    said = opened_by_nobody(folder)
    assert said.startswith(f"TierFailed: disk_cache: '{folder}' can't be used: ")
    assert "Permission denied" in said


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(TierFailed, match=r"disk_cache: '.*file' can't be used"):
        DiskStore(tmp_path / "file", CAPACITY, PAGE_BYTES)
    assert (tmp_path / "file").read_text() == "no folder"


def test_what_is_no_segment_stays(tmp_path: Path) -> None:
    content(tmp_path).mkdir()
    others = ["notes.txt", "x.kv", "-1.kv", "²³.kv", "0000000001.kv.bak"]
    for name in others:
        (content(tmp_path) / name).write_text("mine")
    with closing(DiskStore(tmp_path, 10 * RECORD, PAGE_BYTES)) as store:
        put(store, numbered(40))
        assert store.used <= 10 * RECORD
    assert all((content(tmp_path) / name).read_text() == "mine" for name in others)


@pytest.mark.parametrize("seed", range(10))
def test_flipped_bits_cost_the_pages_that_they_hit(tmp_path: Path, seed: int) -> None:
    filled(tmp_path)
    draw = random.Random(seed)
    hit = set()
    for _ in range(5):
        number = draw.randrange(5)
        path = segments(tmp_path)[number]
        data = bytearray(path.read_bytes())
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        hit.add(20 * number + at // RECORD)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        there = right(store, numbered(100))  # fails for a wrong page
        lost = {i for i, good in enumerate(there) if not good}
        assert lost <= hit
        assert store.damaged == len(lost)
        assert [each is not None for each in store.find(numbered(100))] == there, "they are gone"
        put(store, numbered(100))
        assert all(right(store, numbered(100)))


@pytest.mark.parametrize(
    "part", ["magic", "version", "tokens", "size", "parent", "sum", "key", "page"]
)
def test_each_part_of_a_record_is_checked(tmp_path: Path, part: str) -> None:
    filled(tmp_path, 3)
    names = ("magic", "version", "tokens", "size", "parent", "sum", "key", "page")
    at = dict(zip(names, (0, 4, 8, 12, 16, 32, 40, 70), strict=True))[part]
    with segments(tmp_path)[0].open("r+b") as file:
        file.seek(RECORD + at)
        old = file.read(1)
        file.seek(RECORD + at)
        file.write(bytes([old[0] ^ 4]))
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        assert right(store, numbered(3)) == [True, False, True]
        assert store.damaged == 1


@pytest.mark.parametrize("seed", range(5))
def test_segments_that_were_cut_off_have_what_is_left(tmp_path: Path, seed: int) -> None:
    filled(tmp_path)
    draw = random.Random(seed)
    kept = [20] * 5
    for number in draw.sample(range(5), 2):
        path = segments(tmp_path)[number]
        size = draw.randrange(path.stat().st_size)
        os.truncate(path, size)
        # The last record may lack no more than the zeros that fill it up.
        kept[number] = (size + RECORD - 64 - PAGE_BYTES) // RECORD
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        expected = [i % 20 < kept[i // 20] for i in range(100)]
        assert right(store, numbered(100)) == expected
        assert store.damaged == expected.count(False)


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_index_gives_no_wrong_page(tmp_path: Path, seed: int) -> None:
    """Random bits, bytes or lengths of it; what is noticed makes it anew."""
    filled(tmp_path)
    path = content(tmp_path) / "index.sqlite"
    draw = random.Random(seed)
    data = bytearray(path.read_bytes())
    if seed % 3 == 0:
        data = data[: draw.randrange(len(data))]
    for _ in range(draw.choice((1, 20, 400))):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)
    keys = numbered(120)
    store = DiskStore(tmp_path, CAPACITY, PAGE_BYTES)
    failed = 0
    for _ in range(6):
        try:
            right(store, keys)
            for key in keys[::10]:
                store.find_longest(line(*np.frombuffer(key.tokens, np.int32)[:2], 9)[0])
            put(store, keys)
            store.hottest([ROOT_NAME], 100)
        except TierFailed:
            failed += 1
    assert failed <= 2, "an index that is made anew is right"
    store.close()
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        assert sum(right(store, keys)) >= 100


@pytest.mark.parametrize(
    "what", ["no database", "empty", "missing", "another table", "another form"]
)
def test_an_index_that_is_none_is_made_anew(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    path = content(tmp_path) / "index.sqlite"
    path.unlink() if what != "another form" else None
    if what == "no database":
        path.write_bytes(b"no database at all" * 500)
    elif what == "empty":
        path.write_bytes(b"")
    elif what != "missing":
        with closing(sqlite3.connect(path)) as connection:
            if what == "another table":
                connection.execute("CREATE TABLE pages (name TEXT)")
            connection.execute("PRAGMA user_version = " + ("1" if "table" in what else "77"))
            connection.commit()
    with (
        caplog.at_level(logging.WARNING),
        closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store,
    ):
        assert all(right(store, numbered(100)))
    assert "is made anew" in caplog.text


def test_an_index_made_anew_passes_over_damaged_records(tmp_path: Path) -> None:
    """Also where a header's lengths are wrong, and where the end of a segment is missing."""
    filled(tmp_path)
    for number, (record, at) in enumerate([(3, 0), (4, 8), (5, 15), (6, 20)]):
        with segments(tmp_path)[number].open("r+b") as file:
            file.seek(record * RECORD + at)
            file.write(b"\x77")
    os.truncate(segments(tmp_path)[4], 10 * RECORD + 50)
    (content(tmp_path) / "index.sqlite").unlink()
    lost = {3, 24, 45, 66, *range(90, 100)}
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        assert right(store, numbered(100)) == [i not in lost for i in range(100)]


def test_an_index_that_is_damaged_while_it_is_used_is_made_anew(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        assert all(right(store, numbered(100)))
        path = content(tmp_path) / "index.sqlite"
        store._index.used({numbered(1)[0]: 1})
        for name in (path, path.with_name("index.sqlite-wal")):
            with name.open("r+b") as file:
                file.write(os.urandom(max(100, name.stat().st_size)))
        failed = 0
        for _ in range(3):
            try:
                put(store, numbered(110))
                right(store, numbered(110))
            except TierFailed:
                failed += 1
        assert failed <= 2
        assert all(right(store, numbered(110)))


def test_stored_pages_survive_an_index_made_anew_beside_a_writer(tmp_path: Path) -> None:
    """What is written while a reader finds the index damaged is not forgotten."""
    filled(tmp_path)
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        put(store, numbered(120)[100:])
        store._mend(store._index, ValueError("as if a reader had found it so"))
        assert all(right(store, numbered(120)))
        put(store, numbered(130)[120:])
        assert all(right(store, numbered(130)))


def test_records_of_another_version_are_none(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    with segments(tmp_path)[0].open("r+b") as file:
        file.seek(4)
        file.write((VERSION + 1).to_bytes(4, "little"))
    with closing(DiskStore(tmp_path, CAPACITY, PAGE_BYTES)) as store:
        assert right(store, numbered(3)) == [False, True, True]
    assert len(contents(numbered(3))) == 3
