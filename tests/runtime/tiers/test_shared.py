"""What a server can do to its clients: die, hang, forget, be full, answer nonsense."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from redis_server import RedisServer, free_port
from tier_pages import PAGE_BYTES, ROOT, content, line, numbered, put, right

from coppice.runtime.tiers import shared
from coppice.runtime.tiers.shared import SharedStore
from coppice.runtime.tiers.store import Place, TierFailed

redis = pytest.importorskip("redis")
Serve = Callable[..., RedisServer]


@pytest.fixture
def store(server: RedisServer) -> Iterator[SharedStore]:
    with closing(SharedStore(server.url, PAGE_BYTES, timeout=0.5)) as opened:
        yield opened


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with closing(redis.Redis(port=server.port)) as opened:
        yield opened


def fails(store: SharedStore) -> list[str]:
    """What each of the calls says."""
    key, out = line(1, 2, 3), np.zeros((1, PAGE_BYTES), np.uint8)
    said = []
    calls: list[Callable[[], object]] = [
        lambda: store.find(key),
        lambda: store.find_longest(key[0]),
        lambda: store.load(key, [Place(3, key[0])], out),
        lambda: put(store, key),
    ]
    for call in calls:
        with pytest.raises(TierFailed) as failed:
            call()
        said.append(str(failed.value))
    return said


def test_two_servers_share_what_one_stored(server: RedisServer, store: SharedStore) -> None:
    keys = line(*range(40))
    put(store, keys)
    with closing(SharedStore(server.url, PAGE_BYTES)) as other:
        assert right(other, keys) == [True] * 10
        found = other.find_longest(line(*range(6))[1])
        assert found is not None
        assert found.tokens == 2
        assert (other.capacity, other.used, other.hottest([ROOT], 5)) == (None, None, [])


def test_databases_are_apart_and_a_socket_is_the_same_server(
    server: RedisServer, store: SharedStore
) -> None:
    put(store, line(1, 2))
    with closing(SharedStore(f"unix://{server.socket}", PAGE_BYTES)) as same:
        assert right(same, line(1, 2)) == [True]
    with closing(SharedStore(server.url[:-1] + "3", PAGE_BYTES)) as other:
        assert right(other, line(1, 2)) == [False]


def test_a_server_that_dies_fails_each_call_and_is_used_when_it_is_back(
    server: RedisServer, store: SharedStore
) -> None:
    put(store, numbered(5))
    server.end()
    assert all(f"127.0.0.1:{server.port}" in text for text in fails(store))
    server.start()
    assert right(store, numbered(5)) == [False] * 5
    assert put(store, numbered(5)) == 5
    assert right(store, numbered(5)) == [True] * 5


@pytest.mark.slow
def test_a_server_that_hangs_fails_each_call(server: RedisServer, store: SharedStore) -> None:
    put(store, numbered(5))
    server.pause()
    try:
        assert all("imeout" in text or "imed out" in text for text in fails(store))
    finally:
        server.go_on()
    assert right(store, numbered(5)) == [True] * 5


def test_a_server_that_takes_no_bytes_fails_a_large_write(
    server: RedisServer, store: SharedStore
) -> None:
    """More than the buffers between both hold."""
    keys = numbered(50)
    with closing(SharedStore(server.url, 2**20, timeout=0.5)) as large:
        assert large.find(keys) == [None] * 50  # it is connected
        server.pause()
        try:
            with pytest.raises(TierFailed):
                large.store(keys, np.zeros((50, 2**20), np.uint8))
        finally:
            server.go_on()


def test_a_server_that_forgets_is_a_miss(client: Any, store: SharedStore) -> None:
    keys = numbered(5)
    put(store, keys)
    places = [each for each in store.find(keys) if each is not None]
    client.flushall()
    out = np.zeros((5, PAGE_BYTES), np.uint8)
    assert store.load(keys, places, out) == [False] * 5
    assert store.find(keys) == [None] * 5
    assert store.find_longest(keys[0]) is None
    assert store.damaged == 0
    assert put(store, keys) == 5


def test_what_is_hit_elsewhere_stays_and_what_is_gone_is_told(
    client: Any, store: SharedStore
) -> None:
    keys = numbered(3)
    put(store, keys)
    for key in keys[:2]:
        client.expire(shared._page(key), 100)
    client.delete(shared._page(keys[1]))
    assert store.used_above(keys, 4) == [keys[1]]
    assert client.ttl(shared._page(keys[0])) > 100_000


def test_lines_whose_page_is_gone_are_removed_and_the_next_best_is_found(
    client: Any, store: SharedStore
) -> None:
    best, next_best = line(1, 2, 3, 4), line(1, 2, 9)
    put(store, best + next_best)
    client.delete(shared._page(best[0]))
    found = store.find_longest(line(1, 2, 3, 5)[0])
    assert found is not None
    assert (found.tokens, found.at) == (2, next_best[0])
    members = client.zrange(shared._following(best[0].parent), 0, -1)
    assert members == [next_best[0].tokens]


def test_lines_whose_page_does_not_load_are_removed(client: Any, store: SharedStore) -> None:
    keys = numbered(3)
    put(store, keys)
    places = [each for each in store.find(keys) if each is not None]
    client.delete(shared._page(keys[1]))
    assert store.load(keys, places, np.zeros((3, PAGE_BYTES), np.uint8)) == [True, False, True]
    assert client.zcard(shared._following(keys[0].parent)) == 2


def test_pages_and_lines_are_kept_for_a_week_since_their_last_use(
    client: Any, store: SharedStore
) -> None:
    keys = numbered(2)
    put(store, keys)
    names = [shared._page(keys[0]), shared._page(keys[1]), shared._following(keys[0].parent)]
    assert all(client.ttl(name) > 6 * 24 * 3600 for name in names)
    assert sorted(client.keys()) == sorted(name.encode() for name in names)
    for name in names:
        client.expire(name, 100)
    right(store, keys[:1])
    assert [client.ttl(name) > 100 for name in names] == [True, False, False]
    put(store, keys[1:])
    assert [client.ttl(name) > 100 for name in names] == [True, True, True]


def test_lines_after_one_parent_are_bounded(
    client: Any, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_FOLLOWING", 10)
    keys = numbered(35)
    for begin in range(0, 35, 5):
        put(store, keys[begin : begin + 5])
        assert client.zcard(shared._following(keys[0].parent)) <= 10
    assert right(store, keys) == [True] * 35, "the pages themselves stay"


@pytest.mark.parametrize("asked", [1, 3])
def test_many_pages_go_in_bounded_pieces(
    store: SharedStore, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    monkeypatch.setattr(shared, "_ASKED", asked)
    monkeypatch.setattr(store, "_step", asked)
    keys = numbered(10)
    assert put(store, keys) == 10
    assert put(store, keys) == 0
    assert right(store, keys) == [True] * 10


def flipped(value: bytes, at: int) -> bytes:
    changed = bytearray(value)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_values_are_counted_and_gone(client: Any, store: SharedStore, seed: int) -> None:
    """Flipped bits, other lengths, and the right value of another page."""
    draw = random.Random(seed)
    keys = numbered(5)
    put(store, keys)
    places = [each for each in store.find(keys) if each is not None]
    value = client.get(shared._page(keys[2]))
    # Not the zeros between head and page.
    used = [*range(40 + len(keys[2].tokens)), *range(64, len(value))]
    wrong = draw.choice([
        flipped(value, draw.choice(used)),
        value[: draw.randrange(len(value))],
        value + b"x",
        client.get(shared._page(keys[3])),
        os.urandom(len(value)),
    ])  # fmt: skip
    client.set(shared._page(keys[2]), wrong)
    out = np.zeros((5, PAGE_BYTES), np.uint8)
    assert store.load(keys, places, out) == [True, True, False, True, True]
    assert store.damaged == 1
    assert client.exists(shared._page(keys[2])) == 0
    assert right(store, keys) == [True, True, False, True, True]
    assert put(store, keys) == 1
    assert right(store, keys) == [True] * 5


def test_values_of_other_kinds_are_misses_and_are_replaced(client: Any, store: SharedStore) -> None:
    keys = numbered(3)
    put(store, keys)
    places = [each for each in store.find(keys) if each is not None]
    client.delete(shared._page(keys[1]), shared._following(keys[0].parent))
    client.rpush(shared._page(keys[1]), "a list")
    client.set(shared._following(keys[0].parent), "a text")
    assert store.load(keys, places, np.zeros((3, PAGE_BYTES), np.uint8)) == [True, False, True]
    assert store.find_longest(keys[0]) is None
    assert put(store, keys) == 1
    found = store.find_longest(keys[1])
    assert found is not None
    assert found.tokens == 4
    assert right(store, keys) == [True] * 3
    client.delete(shared._following(keys[0].parent))
    client.rpush(shared._following(keys[0].parent), "a list")
    put(store, numbered(4))
    put(store, numbered(4))
    assert store.find_longest(keys[1]) is not None


def test_members_that_are_no_tokens_are_passed_over(client: Any, store: SharedStore) -> None:
    [key] = line(1, 2, 3, 4)
    put(store, [key])
    odd = {key.tokens[:5]: 0, key.tokens + b"x": 0, key.tokens[:15] + b"\xff": 0, b"": 0}
    client.zadd(shared._following(key.parent), odd)
    found = store.find_longest(key)
    assert found is not None
    assert (found.tokens, found.at) == (4, key)
    assert client.zrange(shared._following(key.parent), 0, -1) == [key.tokens]


def test_a_full_server_fails_writes_and_goes_on_reading(serve: Serve) -> None:
    full = serve("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    keys = numbered(5000)
    with closing(SharedStore(full.url, PAGE_BYTES)) as store:
        stored = 0
        said = ""
        while not said:
            try:
                stored += put(store, keys[stored : stored + 50])
            except TierFailed as error:
                said = str(error)
        assert "maxmemory" in said
        assert stored
        assert all(right(store, keys[:stored]))
        assert store.damaged == 0


def test_a_server_that_drops_what_it_has_no_memory_for(serve: Serve) -> None:
    small = serve("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    keys = numbered(5000)
    with closing(SharedStore(small.url, PAGE_BYTES)) as store:
        for begin in range(0, 5000, 50):
            put(store, keys[begin : begin + 50])
        there = right(store, keys)
        assert 0 < sum(there) < 5000
        for i in range(0, 5000, 500):
            store.find_longest(keys[i])
        assert store.damaged == 0


def test_a_password(serve: Serve) -> None:
    locked = serve("--requirepass", "geheim")
    with closing(SharedStore(f"redis://:geheim@127.0.0.1:{locked.port}", PAGE_BYTES)) as store:
        put(store, line(1, 2))
        assert right(store, line(1, 2)) == [True]
    for password in ("", ":falsch@"):
        url = f"redis://{password}127.0.0.1:{locked.port}"
        with closing(SharedStore(url, PAGE_BYTES)) as refused:
            assert all("uthentication" in text or "password" in text for text in fails(refused))
            assert not any("falsch" in text for text in fails(refused))


def test_a_server_that_refuses_connections_fails(serve: Serve) -> None:
    few = serve("--maxclients", "1")
    with (
        closing(redis.Redis(port=few.port)) as first,
        closing(SharedStore(few.url, PAGE_BYTES)) as store,
    ):
        first.ping()
        assert len(fails(store)) == 4


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where each connection is answered like that."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)

        def run() -> None:
            while not ended.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    continue
                with connection:
                    connection.settimeout(1)
                    with suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$-5\r\n",
        b"$99999999999\r\nabc",
        b"*999999999\r\n",
        b":not a number\r\n",
        b"*1\r\n" * 5000,
        b"\x00\xff" * 100 + b"\r\n",
        b"-ERR something else\r\n" * 10,
        b"+OK\r\n" * 10,
        b"*0\r\n" * 10,
        b"$3\r\nabc\r\n" * 10,
        b":1\r\n" * 10,
        b":1064\r\n" * 10,
        b"",
    ],
)
def test_nonsense_is_a_failure_or_a_miss(answer: bytes) -> None:
    def reply(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            connection.sendall(answer)
            if not answer:
                return

    key = line(1, 2, 3, 4)
    with (
        answering(reply) as port,
        closing(SharedStore(f"redis://127.0.0.1:{port}", PAGE_BYTES, timeout=0.3)) as store,
    ):
        out = np.zeros((1, PAGE_BYTES), np.uint8)
        calls: list[Callable[[], bool]] = [
            lambda: any(store.load(key, [Place(4, key[0])], out)),
            lambda: store.find_longest(key[0]) is not None and False,
            lambda: store.find(key) == [] or put(store, key) < 0,
        ]
        said: list[str] = []
        for call in calls:
            try:
                assert call() is False
            except TierFailed as error:
                said.append(str(error))
        assert all(text.startswith("shared_cache: redis://127.0.0.1") for text in said)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_random_changes_on_the_way_give_no_wrong_page(server: RedisServer, seed: int) -> None:
    """Between client and server, bytes of answers change, are lost or come twice."""
    keys = numbered(20)
    draw = random.Random(seed)

    def relay(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.2) as behind:
            while asked := connection.recv(1 << 20):
                behind.sendall(asked)
                try:
                    data = bytearray(behind.recv(1 << 20))
                except TimeoutError:
                    continue
                for _ in range(draw.choice((0, 0, 0, 0, 1, 3))):
                    at = draw.randrange(len(data))
                    what = draw.random()
                    if what < 0.6:
                        data[at] = draw.randrange(256)
                    elif what < 0.8:
                        del data[at : at + draw.randrange(1, 50)]
                    else:
                        data[at:at] = data[at : at + draw.randrange(1, 50)]
                    if not data:
                        break
                connection.sendall(data)

    loaded = failed = 0
    with (
        answering(relay) as port,
        closing(SharedStore(f"redis://127.0.0.1:{port}", PAGE_BYTES, timeout=0.2)) as other,
        closing(SharedStore(server.url, PAGE_BYTES, timeout=10)) as store,
    ):
        for _ in range(25):
            put(store, keys)  # what comes in damaged is removed
            out = np.zeros((20, PAGE_BYTES), np.uint8)
            try:
                good = other.load(keys, [Place(4, key) for key in keys], out)
                other.find(keys)
                other.find_longest(keys[3])
            except TierFailed:
                failed += 1
                continue
            for key, row, each in zip(keys, out, good, strict=True):
                assert not each or np.array_equal(row, content(key))
                loaded += each
    assert loaded
    assert other.damaged or failed, "something was changed"


def test_nobody_listens() -> None:
    with closing(SharedStore(f"redis://127.0.0.1:{free_port()}", PAGE_BYTES)) as store:
        assert all("shared_cache: redis://127.0.0.1" in text for text in fails(store))


def test_connections_are_few_and_reused(server: RedisServer, client: Any) -> None:
    store = SharedStore(server.url, PAGE_BYTES, timeout=30.0)  # threads wait for each other
    keys = numbered(20)
    put(store, keys)
    faults: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(10):
                assert all(right(store, keys))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=read) for _ in range(20)]
    before = len(client.client_list())
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not faults
    assert len(client.client_list()) - before <= shared._CONNECTIONS
    store.close()
    assert put(store, keys) == 0, "it connects again"
    store.close()
