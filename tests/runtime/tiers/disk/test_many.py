"""A folder with a million pages: what opening it and finding pages read does not grow with it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tier_pages import PAGE_BYTES, line, numbered

from coppice.radix.mirror.names import PageKey
from coppice.runtime.tiers.disk.folder import content
from coppice.runtime.tiers.disk.index import Entry, Index
from coppice.runtime.tiers.disk.store import DiskStore

PAGES = 1_000_000
SEGMENTS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Indexed in as many segments, each a file, whose records nobody reads here."""
    folder = tmp_path_factory.mktemp("million")
    DiskStore(folder, 2**40, PAGE_BYTES).close()
    index = Index(content(folder) / "index.sqlite")
    each = PAGES // SEGMENTS
    for segment in range(1, SEGMENTS + 1):
        index.add(
            Entry(_key(number), segment, 1088 * (number % each), PAGE_BYTES)
            for number in range((segment - 1) * each, segment * each)
        )
        (content(folder) / f"{segment:010}.kv").write_bytes(b"")
    index.close()
    return folder


def _key(number: int) -> PageKey:
    """Pages of many prompts, with names as they really are."""
    parent = line(number // 10, 1, 2, 3)[0].name
    return PageKey(parent, line(number % 10, number, 5, 6)[0].tokens)


def bytes_read() -> int:
    """By all calls of this process so far, from the disk or from memory."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.split("rchar:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_opening_and_finding_read_little(folder: Path) -> None:
    size = (content(folder) / "index.sqlite").stat().st_size
    assert size > 50 * PAGES
    before = bytes_read()
    with closing(DiskStore(folder, 2**40, PAGE_BYTES)) as store:
        opening = bytes_read() - before
        assert opening < 2**18
        keys = [_key(number) for number in range(0, PAGES, PAGES // 200)]
        before = bytes_read()
        found = store.find(keys)
        assert all(place is not None for place in found)
        assert bytes_read() - before < 200 * 6 * 4096
        assert store.find(numbered(50)) == [None] * 50
        before = bytes_read()
        place = store.find_longest(PageKey(keys[7].parent, keys[7].tokens[:8] + b"\x07\0\0\0"))
        assert place is not None
        assert place.tokens == 2
        assert bytes_read() - before < 20 * 4096
