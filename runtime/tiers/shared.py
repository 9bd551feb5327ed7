"""The tier that a Redis or Valkey server keeps for several engines."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from coppice.radix.mirror.names import PageKey
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.tiers.address import check_address
from coppice.runtime.tiers.disk.record import VERSION, head, head_bytes, is_right
from coppice.runtime.tiers.store import Place, Store, Stored, TierFailed

logger = logging.getLogger(__name__)

_CONNECTIONS = 8
_KEPT_SECONDS = 7 * 24 * 3600  # since a page was written or read last
_FOLLOWING = 1 << 16  # pages after the same parent that are found by their first tokens
_PIECE = 16 * 2**20  # bytes of pages in one request
_ASKED = 1024  # keys of one request
_NEIGHBOURS = 4  # on each side, since the pages of some may be gone

Command = tuple[Any, ...]


class SharedStore(Store):
    """Pages in a server's memory, each with a checksum over all of its bytes.

    A page is a value: the head that a disk's record has, and the page. For each parent a sorted set
    has the tokens of the pages that follow it, which finds the one that agrees with most of them.
    What nobody has used for a week the server forgets; before that its `maxmemory-policy` decides.
    A call tries nothing twice.
    """

    name = "shared"

    def __init__(self, url: str, page_bytes: int, *, timeout: float = 2.0) -> None:
        """Connects at the first call: a server that is down may come up later.

        Args:
            url: of the server, see `check_address`.
            page_bytes: of a packed page.
            timeout: seconds for which a call waits for a connection, and for each next part of an
                answer.

        Raises ValueError for another URL, or if the package `redis` is missing.
        """
        self._shown = check_address(url)
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError(
                f"shared_cache is {self._shown!r}; it needs the package redis: "
                f"pip install 'coppice[tiers]' ({error})"
            ) from error
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._client: Any = redis.Redis(connection_pool=pool)
        self._page_bytes = page_bytes
        self._step = max(1, min(_ASKED, _PIECE // page_bytes))
        self._damaged = 0
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int | None:
        return None

    @property
    def used(self) -> int | None:
        return None

    @property
    def damaged(self) -> int:
        return self._damaged

    def find(self, keys: Sequence[PageKey]) -> list[Place | None]:
        with self._explained():
            there = self._there(keys)
        return [
            Place(key.length, key) if found else None
            for key, found in zip(keys, there, strict=True)
        ]

    def find_longest(self, key: PageKey) -> Place | None:
        with self._explained():
            near = self._neighbours(key)
            there = dict(zip(near, self._there(near), strict=True))
            self._forget([each for each, found in there.items() if not found])
        same = {
            each: common_prefix(each.tokens, 0, key.tokens) // TOKEN_BYTES
            for each, found in there.items()
            if found
        }
        best = max(same, key=lambda each: same[each], default=None)
        return Place(same[best], best) if best is not None and same[best] else None

    def load(self, keys: Sequence[PageKey], places: Sequence[Place], out: np.ndarray) -> list[bool]:
        right: list[bool] = []
        gone: list[PageKey] = []
        damaged: list[PageKey] = []
        with self._explained():
            for piece in _pieces([place.at for place in places], self._step):
                for key, value in zip(piece, self._values(piece), strict=True):
                    good = value is not None and self._take(key, value, out[len(right)])
                    right.append(good)
                    if not good:
                        (gone if value is None else damaged).append(key)
            self._forget(gone + damaged)
            for piece in _pieces(damaged, _ASKED):
                self._ask([("UNLINK", _page(key)) for key in piece])
        if damaged:
            with self._lock:
                self._damaged += len(damaged)
            logger.warning("%d pages in %s are damaged and will be computed again", len(damaged),
                           self._shown)  # fmt: skip
        return right

    def store(self, keys: Sequence[PageKey], pages: np.ndarray) -> Stored:
        done = Stored()
        with self._explained():
            rows = dict(zip(keys, range(len(keys)), strict=True))
            there = dict(zip(rows, self._there(list(rows)), strict=True))
            new = [key for key, found in there.items() if not found]
            for piece in _pieces([key for key, found in there.items() if found], _ASKED):
                self._ask([("EXPIRE", _page(key), _KEPT_SECONDS) for key in piece])
                self._enter(piece)
            for piece in _pieces(new, self._step):
                self._ask([
                    ("SET", _page(key), self._value(key, pages[rows[key]]), "EX", _KEPT_SECONDS)
                    for key in piece
                ])  # fmt: skip
                self._enter(piece)
                done.written += len(piece)
            done.known = len(keys) - len(new)
        return done

    def used_above(self, keys: Sequence[PageKey], times: int) -> list[PageKey]:
        """They stay for another week."""
        gone: list[PageKey] = []
        with self._explained():
            for piece in _pieces(keys, _ASKED):
                found = self._ask([("EXPIRE", _page(key), _KEPT_SECONDS) for key in piece])
                gone += [key for key, there in zip(piece, found, strict=True) if not there]
        return gone

    def close(self) -> None:
        try:
            self._client.connection_pool.disconnect()
        except Exception as error:
            logger.info("shared_cache: %s: %s", self._shown, error)

    def _there(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which pages the server has, by the lengths of their values."""
        found: list[bool] = []
        for piece in _pieces(keys, _ASKED):
            lengths = self._ask([("STRLEN", _page(key)) for key in piece], any_kind=True)
            found += [
                length == self._value_bytes(key) for key, length in zip(piece, lengths, strict=True)
            ]
        return found

    def _value_bytes(self, key: PageKey) -> int:
        return head_bytes(len(key.tokens)) + self._page_bytes

    def _value(self, key: PageKey, page: np.ndarray) -> bytes:
        return head(key, page) + page.tobytes()

    def _values(self, keys: Sequence[PageKey]) -> list[bytes | None]:
        """The values of pages, which stay for another week; None for one that is gone."""
        values = self._ask([
            ("MGET", *(_page(key) for key in keys)),
            *(("EXPIRE", _page(key), _KEPT_SECONDS) for key in keys),
        ])[0]  # fmt: skip
        if not isinstance(values, list) or len(values) != len(keys):
            raise TypeError("the answer has another form than Redis's")
        return [each if isinstance(each, bytes) else None for each in values]

    def _take(self, key: PageKey, value: bytes, row: np.ndarray) -> bool:
        """Copies a page from its value; returns whether all bits are right."""
        border = head_bytes(len(key.tokens))
        if len(value) != self._value_bytes(key):
            return False
        page = np.frombuffer(value, np.uint8, offset=border)
        if not is_right(memoryview(value)[:border], key.parent, key.tokens, page):
            return False
        row[:] = page
        return True

    def _neighbours(self, key: PageKey) -> list[PageKey]:
        """Pages after the same parent, those whose tokens sort next to these on both sides.

        Among sorted texts, one that shares the longest prefix with another is next to it.
        """
        name, limit = _following(key.parent), ("LIMIT", 0, _NEIGHBOURS)
        answers = self._ask([
            ("ZRANGEBYLEX", name, b"[" + key.tokens, b"+", *limit),
            ("ZREVRANGEBYLEX", name, b"(" + key.tokens, b"-", *limit),
        ], any_kind=True)  # fmt: skip
        if any(isinstance(each, Exception) for each in answers):
            self._ask([("UNLINK", name)])  # no sorted set: what others have put there
            return []
        members = [each for found in answers for each in found if isinstance(each, bytes)]
        return [PageKey(key.parent, each) for each in dict.fromkeys(members)]

    def _enter(self, keys: Sequence[PageKey]) -> None:
        """Has pages found by their first tokens, a bounded number of them after each parent."""
        added: dict[bytes, list[bytes]] = {}
        for key in keys:
            added.setdefault(key.parent, []).append(key.tokens)
        commands: list[Command] = []
        for parent, lines in added.items():
            name = _following(parent)
            commands += [
                ("ZADD", name, *(each for tokens in lines for each in (0, tokens))),
                ("EXPIRE", name, _KEPT_SECONDS),
                ("ZCARD", name),
            ]
        answers = self._ask(commands, any_kind=True)
        after: list[Command] = []
        for parent, count in zip(added, answers[2::3], strict=True):
            name = _following(parent)
            if isinstance(count, Exception):  # what others have put there; the next call enters it
                after.append(("UNLINK", name))
            elif count > _FOLLOWING:
                # Any of them: which will be wanted is not known. Their pages stay, and are found.
                first = random.randrange(_FOLLOWING)
                last = first + count - _FOLLOWING - 1
                after.append(("ZREMRANGEBYRANK", name, first, last))
        self._ask(after)

    def _forget(self, keys: Sequence[PageKey]) -> None:
        """Pages that are gone are no longer found by their first tokens."""
        for piece in _pieces(keys, _ASKED):
            self._ask(
                [("ZREM", _following(key.parent), key.tokens) for key in piece], any_kind=True
            )

    def _ask(self, commands: Sequence[Command], *, any_kind: bool = False) -> list[Any]:
        """The answers to commands that are sent together.

        `any_kind`: that a key has a value of another kind is an answer, an exception. Others are
        raised.
        """
        if not commands:
            return []
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        for each in answers:
            if isinstance(each, Exception) and not (any_kind and "WRONGTYPE" in str(each)):
                raise each
        return answers

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises TierFailed for every error: what is raised for an answer that no Redis gives can
        be of any kind.
        """
        try:
            yield
        except Exception as error:
            raise TierFailed(
                f"shared_cache: {self._shown} can't be used: {error or type(error).__name__}"
            ) from error


def _page(key: PageKey) -> str:
    return f"coppice:{VERSION}:page:{key.name.hex()}"


def _following(parent: bytes) -> str:
    return f"coppice:{VERSION}:following:{parent.hex()}"


def _pieces(keys: Sequence[PageKey], size: int) -> Iterator[Sequence[PageKey]]:
    for begin in range(0, len(keys), size):
        yield keys[begin : begin + size]
