"""The tier that keeps pages on a disk."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import numpy as np

from coppice.radix.mirror.names import PageKey
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.tiers.disk.folder import FolderLock, content, open_index, rebuild
from coppice.runtime.tiers.disk.index import Entry, Index, is_damage, is_full
from coppice.runtime.tiers.disk.record import record_bytes
from coppice.runtime.tiers.disk.room import drop_oldest, no_room, read
from coppice.runtime.tiers.disk.segments import Segments
from coppice.runtime.tiers.store import HotPage, Place, Store, Stored, TierFailed

logger = logging.getLogger(__name__)

_SEGMENT = 256 * 2**20
_SEGMENTS = 16  # a folder has at least as many, so that making room drops little at once
_PIECES = 4  # a segment is written in at least as many, so that it gets nearly full
_NOTED = 4096  # hits are written to the index when there are so many


def segment_bytes(capacity: int) -> int:
    """Bytes of one segment in a folder of this capacity, where no record is larger."""
    return max(1, min(_SEGMENT, capacity // _SEGMENTS))


class DiskStore(Store):
    """Pages in segment files, indexed by SQLite; each has a checksum over all of its bytes.

    What is stored is on the disk before it is indexed, so nothing that a process had stored is lost
    with it, and nothing half written is ever found. When the folder is full the oldest segment
    goes; pages of it that were used since they were written are written again at the end, those
    used last as far as they fill half a segment (first in, first out, with a second chance).
    """

    name = "disk"

    def __init__(self, folder: str | Path, capacity: int, page_bytes: int) -> None:
        """Opens or makes the folder. O(segments) for one that is right.

        Args:
            folder: where files are; it is made if it does not exist.
            capacity: the most bytes of segment files; half a segment, 1/32 of it, may be there
                beyond that while room is made.
            page_bytes: of a packed page.

        Raises TierFailed if the folder can't be used, or belongs to another process, and ValueError
        if no page fits.
        """
        # Nothing is known of the tokens of a page; their record takes at least this.
        if capacity < (least := record_bytes(0, page_bytes)):
            raise ValueError(
                f"disk_cache_size must be at least a page of the KV cache, {least} bytes on a "
                f"disk, got {capacity}"
            )
        self._folder = content(Path(folder))
        self._capacity = capacity
        self._page_bytes = page_bytes
        self._most = segment_bytes(capacity)
        self._hits: Counter[PageKey] = Counter()  # uses since the last transaction
        self._gone: list[bytes] = []  # names of pages that were dropped, and not told yet
        self._lock = threading.Lock()
        self._writing = threading.RLock()  # whoever changes segments, or makes the index anew
        self._damaged = 0
        self._closed = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held = FolderLock(self._folder)
        except OSError as error:
            raise TierFailed(f"disk_cache: {str(folder)!r} can't be used: {error}") from error
        with ExitStack() as undo:
            undo.callback(self._held.release)
            try:
                self._segments = Segments(self._folder, self._most)
                undo.callback(self._segments.close)
                self._index: Index = open_index(self._folder, self._segments)
            except (OSError, sqlite3.Error) as error:
                raise TierFailed(f"disk_cache: {str(folder)!r} can't be used: {error}") from error
            undo.pop_all()

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def used(self) -> int:
        return self._segments.used

    @property
    def damaged(self) -> int:
        return self._damaged

    def find(self, keys: Sequence[PageKey]) -> list[Place | None]:
        with self._explained("read") as index:
            found = index.find(keys)
        return [
            Place(each.key.length, each) if each is not None and self._fits(each) else None
            for each in found
        ]

    def find_longest(self, key: PageKey) -> Place | None:
        with self._explained("read") as index:
            entry = index.find_longest(key)
        if entry is None or not self._fits(entry):
            return None
        same = common_prefix(key.tokens, 0, entry.key.tokens) // TOKEN_BYTES
        return Place(same, entry)

    def _fits(self, entry: Entry) -> bool:
        return entry.size == self._page_bytes

    def load(self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray) -> list[bool]:
        right = self.load_ahead(keys, places, out)
        with self._lock:
            self._hits.update(
                place.at.key for place, good in zip(places, right, strict=True) if good
            )
            many = len(self._hits) >= _NOTED
        if many:
            with self._explained("written") as index:
                self._note_hits(index)
        return right

    def load_ahead(
        self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray
    ) -> list[bool]:
        right, wrong = [], []
        with self._explained("read"):
            for place, row in zip(places, out, strict=True):
                good = read(self._segments, place.at, row)
                right.append(good)
                if not good:
                    wrong.append(place.at)
        if wrong:
            self._forget(wrong)
        return right

    def _forget(self, wrong: list[Entry]) -> None:
        """Removes pages that could not be read as they were written; those moved meanwhile stay."""
        damaged = [each for each in wrong if each.segment in self._segments]
        with self._explained("written") as index:
            lost = index.remove(damaged)
            index.remove(each for each in wrong if each.segment not in self._segments)
        with self._lock:
            self._damaged += lost
        if lost:
            logger.warning("%d pages in %s are damaged and will be computed again", lost,
                           self._folder)  # fmt: skip

    def store(self, keys: Sequence[PageKey], pages: np.ndarray) -> Stored:
        done = Stored()
        with self._writing, self._explained("written") as index:
            there = index.find(keys)
            new = {
                key: i
                for i, (key, entry) in enumerate(zip(keys, there, strict=True))
                if entry is None or not self._fits(entry)
            }
            done.known = len(keys) - len(new)
            self._note_hits(index)
            rows = list(new.values())
            step = self._piece(max((len(key.tokens) for key in new), default=0))
            for begin in range(0, len(rows), step):
                piece = rows[begin : begin + step]
                self._write(index, [keys[i] for i in piece], pages[piece])
                done.written += len(piece)
            done.gone, self._gone = self._gone, []
        return done

    def _piece(self, tokens: int) -> int:
        """How many pages, of up to so many bytes of tokens, are written at once."""
        return max(1, self._most // _PIECES // record_bytes(tokens, self._page_bytes))

    def _write(self, index: Index, keys: list[PageKey], pages: np.ndarray) -> None:
        size = sum(record_bytes(len(key.tokens), self._page_bytes) for key in keys)
        while self._segments.used + size > self._capacity and self._drop_oldest(index):
            pass
        shrunk = False
        while True:
            try:
                return self._append(index, keys, pages)
            except (OSError, sqlite3.Error) as error:
                # The disk may be fuller than this folder may get: it gives up the index's log, and
                # then its oldest segment.
                if not no_room(error):
                    raise
                if not shrunk:
                    shrunk = True
                    with suppress(sqlite3.Error):
                        index.shrink()
                elif not self._drop_oldest(index):
                    raise

    def _append(self, index: Index, keys: list[PageKey], pages: np.ndarray) -> None:
        places = self._segments.append(keys, pages)
        try:
            index.add(
                Entry(key, *place, self._page_bytes)
                for key, place in zip(keys, places, strict=True)
            )
        except sqlite3.Error:
            self._segments.cut(places[0][1])
            raise

    def _note_hits(self, index: Index) -> None:
        """Writes down what was used since; a full disk does without."""
        with self._lock:
            hits, self._hits = self._hits, Counter()
        try:
            if hits:
                index.used(hits)
        except sqlite3.Error as error:
            if not is_full(error):
                raise

    def _drop_oldest(self, index: Index) -> bool:
        """Drops a segment; False: there is none."""
        dropped = drop_oldest(index, self._segments, self._most // 2, self._most // _PIECES)
        self._gone += [entry.key.name for entry in dropped or ()]
        return dropped is not None

    def used_above(self, keys: Sequence[PageKey], times: int) -> list[PageKey]:
        with self._writing, self._explained("written") as index:
            there = index.find(keys)
            with self._lock:
                for key, entry in zip(keys, there, strict=True):
                    if entry is not None:
                        self._hits[key] += times
            self._note_hits(index)  # for who is killed
        return [key for key, entry in zip(keys, there, strict=True) if entry is None]

    def hottest(self, roots: Collection[bytes], most: int) -> list[HotPage]:
        """The hottest page that follows what was taken is taken next. O(most log most)."""
        found: list[HotPage] = []
        nearest: list[tuple[int, int, Entry, bytes, int]] = []  # a heap; the numbers differ
        numbers = count(0, -1)  # of pages that are as hot, the last one: a chain stays together
        with self._explained("read") as index:

            def offer(parent: bytes, root: bytes, above: int) -> None:
                for heat, entry in index.hottest_after(parent, self._page_bytes, most - len(found)):
                    heappush(nearest, (-heat, next(numbers), entry, root, above))

            for root in roots:
                offer(root, root, -1)
            while nearest and len(found) < most:
                _, _, entry, root, above = heappop(nearest)
                found.append(HotPage(entry.key, Place(entry.key.length, entry), root, above))
                offer(entry.key.name, root, len(found) - 1)
        return found

    def close(self) -> None:
        if self._closed:
            return
        try:
            with self._explained("written") as index:
                self._note_hits(index)
        except TierFailed as error:
            logger.warning("%s", error)
        with self._writing:
            self._closed = True
            self._index.close()
            self._segments.close()
            self._held.release()

    @contextmanager
    def _explained(self, done: str) -> Iterator[Index]:
        """Gives the index. Raises TierFailed for errors of it, which is made anew if damaged, and
        of files.
        """
        index = self._index
        try:
            yield index
        except OSError as error:
            raise TierFailed(f"disk_cache: {self._folder} can't be {done}: {error}") from error
        except sqlite3.Error as error:
            if is_damage(error) or index.closed:
                self._mend(index, error)
            raise TierFailed(
                f"disk_cache: the index of {self._folder} can't be {done}: {error}"
            ) from error

    def _mend(self, damaged: Index, why: Exception) -> None:
        """Makes the index anew, unless another thread has done so."""
        with self._writing:
            if self._index is not damaged or self._closed:
                return
            damaged.close()
            try:
                self._index = rebuild(self._folder, self._segments, str(why))
            except (OSError, sqlite3.Error) as error:
                logger.warning("the index of %s can't be made anew: %s", self._folder, error)
