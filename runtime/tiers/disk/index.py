"""Where on a disk each page is: a table in SQLite, which survives the end of its process."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from coppice.radix.mirror.names import PageKey
from coppice.radix.tokens import TOKEN_BYTES, common_prefix

_FORM = 1  # of the table; an index of another form is made anew
_SCHEMA = """
CREATE TABLE pages (
    parent BLOB, tokens BLOB, segment INTEGER, offset INTEGER, size INTEGER,
    hits INTEGER, again INTEGER, used INTEGER,
    PRIMARY KEY (parent, tokens)
) WITHOUT ROWID;
CREATE INDEX pages_of_segment ON pages (segment);
"""
_COLUMNS = "parent, tokens, segment, offset, size, hits, again, used"
_PLACE = "parent = ? AND tokens = ? AND segment = ? AND offset = ?"
_BATCH = 200  # keys of one query
_LOG_PAGES = 256  # of SQLite, 1 MiB: what its log has beyond that goes to the file
_WAIT_SECONDS = 10.0  # for another thread's, or process's, transaction
_DOUBLED = 24 * 3600 * 10**6  # twice as many hits count as much as a use so many microseconds later
# How hot a page is: when it was used last, and a day for each time that its hits have doubled. What
# was used at a time that has not come (the clock has been put back) counts as used now.
_HEAT = (
    "min(used, ?) + CASE "
    + " ".join(f"WHEN hits < {2 << i} THEN {i * _DOUBLED}" for i in range(30))
    + f" ELSE {30 * _DOUBLED} END"
)


class IndexDamaged(sqlite3.DatabaseError):
    """The file is no index of this form, or not as it was written."""


class Entry(NamedTuple):
    """Where a page's record is, and which page it is."""

    key: PageKey
    segment: int
    offset: int
    size: int  # bytes of the page
    hits: int = 0  # how often it was used
    again: int = 0  # 1 if it was used since its record was written where it is
    used: int = 0  # when it was used last, in microseconds since 1970; 0: never


class Counts(NamedTuple):
    """What an index has of pages of one size, in bytes."""

    size: int
    pages: int
    tokens: int
    hits: int


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the index has to be made anew. Statements are constant, so a wrong one means that."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, IndexDamaged):
        return True
    return code is not None and code & 0xFF in (
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def is_full(error: sqlite3.Error) -> bool:
    """Whether the disk has no room for the index."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


class Index:
    """The pages of one folder, by the name before them and their tokens.

    Several threads may call it, and another process may read. Each call is O(log pages) for each
    key, opening it O(1). Raises sqlite3.Error where the file can't be read or written;
    `is_damage` says whether it must be made anew.
    """

    def __init__(self, path: Path, *, new: bool = False, read_only: bool = False) -> None:
        """Opens the file, which must have been finished, or with `new` makes it.

        A new one is not opened again before `finish` was called.
        """
        self._path, self._mode = path, "ro" if read_only else "rwc" if new else "rw"
        self._free: list[sqlite3.Connection] = []
        self._closed = False
        self._lock = threading.Lock()
        try:
            with self._connection() as connection:
                if not read_only:
                    connection.execute("PRAGMA journal_mode=WAL").fetchall()
                if new:
                    connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
                else:
                    self._check(connection)
        except sqlite3.Error:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _check(self, connection: sqlite3.Connection) -> None:
        """Raises sqlite3.Error unless it is an index of this form."""
        [form] = connection.execute("PRAGMA user_version").fetchone()
        if form != _FORM:
            raise IndexDamaged(f"it has form {form}, not {_FORM}")
        connection.execute(f"SELECT {_COLUMNS} FROM pages LIMIT 0").fetchall()

    def finish(self) -> None:
        """A new one has all pages that there are."""
        self._rows(f"PRAGMA user_version = {_FORM}")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile, so that no thread waits for a query.

        There are as many as threads ever asked at once.
        """
        with self._lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the index is closed")
            connection = self._free.pop() if self._free else None
        if connection is None:
            connection = self._connect()
        try:
            yield connection
        finally:
            with self._lock:
                if not self._closed:
                    self._free.append(connection)
            if self._closed:
                connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode={self._mode}",
            uri=True,
            timeout=_WAIT_SECONDS,
            check_same_thread=False,
        )
        connection.text_factory = bytes  # there is no text, but damage may look like it
        # A loss of power may cost the last pages; the end of the process costs none.
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
        return connection

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        with self._connection() as connection:
            return connection.execute(query, values).fetchall()

    def find(self, keys: Sequence[PageKey]) -> list[Entry | None]:
        """The entry of each page that has exactly these tokens."""
        found: list[Entry | None] = [None] * len(keys)
        for begin in range(0, len(keys), _BATCH):
            part = keys[begin : begin + _BATCH]
            values = ",".join("(?,?,?)" for _ in part)
            query = (
                f"WITH asked(i, p, t) AS (VALUES {values}) SELECT i, {_COLUMNS} "
                "FROM asked CROSS JOIN pages ON parent = p AND tokens = t"
            )
            arguments = [each for i, key in enumerate(part, begin) for each in (i, *key)]
            for i, *row in self._rows(query, arguments):
                found[i] = _entry(row)
        return found

    def find_longest(self, key: PageKey) -> Entry | None:
        """The entry after the same parent that agrees with most of the tokens; None: with none."""
        best, agreed = None, 0
        for order in (">= ? ORDER BY tokens", "< ? ORDER BY tokens DESC"):
            # Among sorted texts, one that shares the longest prefix with another is next to it.
            rows = self._rows(
                f"SELECT {_COLUMNS} FROM pages WHERE parent = ? AND tokens {order} LIMIT 1", key
            )
            for row in rows:
                entry = _entry(row)
                same = common_prefix(entry.key.tokens, 0, key.tokens) // TOKEN_BYTES
                if same > agreed:
                    best, agreed = entry, same
        return best

    def of_segment(self, segment: int) -> list[Entry]:
        """All pages of a segment, in the order of their places. O(these pages)."""
        rows = self._rows(
            f"SELECT {_COLUMNS} FROM pages WHERE segment = ? ORDER BY offset", (segment,)
        )
        return [_entry(row) for row in rows]

    def add(self, entries: Iterable[Entry]) -> None:
        """Enters pages in one transaction; a page that is there is replaced."""
        with self._connection() as connection, connection:
            connection.executemany(
                f"INSERT OR REPLACE INTO pages ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(*key, *rest) for key, *rest in entries],
            )

    def remove(self, entries: Iterable[Entry]) -> int:
        """Removes pages, unless they have got another place meanwhile, in one transaction.

        Returns how many it removed.
        """
        with self._connection() as connection, connection:
            return connection.executemany(
                f"DELETE FROM pages WHERE {_PLACE}",
                [(*each.key, each.segment, each.offset) for each in entries],
            ).rowcount

    def replace_segment(self, segment: int, kept: Iterable[tuple[Entry, int, int]]) -> None:
        """Removes all pages of a segment, but for those `kept`, each with its new place.

        In one transaction; those kept count as not used since. O(pages of the segment).
        """
        with self._connection() as connection, connection:
            connection.executemany(
                f"UPDATE pages SET segment = ?, offset = ?, again = 0 WHERE {_PLACE}",
                [(*place, *each.key, each.segment, each.offset) for each, *place in kept],
            )
            connection.execute("DELETE FROM pages WHERE segment = ?", (segment,))

    def used(self, times: Mapping[PageKey, int]) -> None:
        """Counts so many uses of each of these pages, all just now, in one transaction."""
        now = time.time_ns() // 1000
        with self._connection() as connection, connection:
            connection.executemany(
                "UPDATE pages SET hits = hits + ?, again = 1, used = ? "
                "WHERE parent = ? AND tokens = ?",
                [(count, now, *key) for key, count in times.items()],
            )

    def hottest_after(self, parent: bytes, size: int, most: int) -> list[tuple[int, Entry]]:
        """Up to `most` pages of `size` bytes after this one that were used, the hottest first.

        Each with its heat, a number that is greater the more and the later a page was used. O(pages
        after this one).
        """
        rows = self._rows(
            f"SELECT {_HEAT} AS heat, {_COLUMNS} FROM pages "
            "WHERE parent = ? AND hits > 0 AND size = ? ORDER BY heat DESC LIMIT ?",
            (time.time_ns() // 1000, parent, size, most),
        )
        return [(heat, _entry(row)) for heat, *row in rows]

    def entries(self) -> Iterator[Entry]:
        """All pages, in no order."""
        with self._connection() as connection:
            for row in connection.execute(f"SELECT {_COLUMNS} FROM pages"):
                yield _entry(row)

    def segments(self) -> dict[int, int]:
        """How many pages each segment has that has any. O(pages)."""
        return dict(self._rows("SELECT segment, count(*) FROM pages GROUP BY segment"))

    def counts(self) -> list[Counts]:
        """What there is of each size of pages. O(pages)."""
        rows = self._rows(
            f"SELECT size, count(*), sum(length(tokens)) / {TOKEN_BYTES}, sum(hits) FROM pages "
            "GROUP BY size ORDER BY size"
        )
        return [Counts(*row) for row in rows]

    def shrink(self) -> None:
        """Moves the log's content to the file, as far as nobody reads it, and empties the log."""
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def compact(self) -> None:
        """Gives back what removed pages have left of the file. O(pages)."""
        self._rows("VACUUM")
        self.shrink()

    def close(self) -> None:
        """Closes the file; its content stays. Calls that still run end first."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for connection in free:
            connection.close()


def _entry(row: Sequence[Any]) -> Entry:
    """A row as an entry. Raises IndexDamaged for one that can't have been written."""
    parent, tokens, *rest = row
    kinds = isinstance(parent, bytes) and isinstance(tokens, bytes)
    if not kinds or not all(isinstance(each, int) for each in rest):
        raise IndexDamaged("a row has values of other kinds")
    return Entry(PageKey(parent, tokens), *rest)
