"""Events of an engine's cache, read by decoders that are written from vLLM's structures."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")

from coppice.radix import PagePool, RadixTree, page_hashes  # noqa: E402
from coppice.radix.mirror.blocks import Blocks  # noqa: E402
from coppice.radix.mirror.changes import Opened, Stored, attached  # noqa: E402
from coppice.radix.mirror.copy import TreeCopy  # noqa: E402
from coppice.radix.namespace import Namespace  # noqa: E402
from coppice.runtime.config import EngineConfig  # noqa: E402
from coppice.runtime.engine.core import Engine  # noqa: E402
from coppice.runtime.metrics.events.broadcast import SNAPSHOT  # noqa: E402
from coppice.runtime.metrics.events.options import Published  # noqa: E402
from coppice.runtime.metrics.events.publisher import Publisher  # noqa: E402
from coppice.runtime.metrics.events.wire import (  # noqa: E402
    block_batch,
    namespace_key,
    read_changes,
)
from coppice.runtime.requests.sampling_params import SamplingParams  # noqa: E402
from tests.radix.test_fuzz import NAMESPACES, Fuzz  # noqa: E402
from tests.runtime.metrics.events.conftest import Listener, ask  # noqa: E402

Address = Callable[[], str]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def structures(**form: Any) -> Any:
    """vLLM's batch and its events, as arrays or as maps."""
    event = {"tag": True, "omit_defaults": True, "gc": False, **form}
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[int | bytes]), ("parent_block_hash", int | bytes | None),
            ("token_ids", list[int]), ("block_size", int), ("lora_id", int | None),
            ("medium", str | None), ("lora_name", str | None),
            ("extra_keys", list[list[Any] | None] | None, None),
        ],
        **event,
    )  # fmt: skip
    removed = msgspec.defstruct(
        "BlockRemoved", [("block_hashes", list[int | bytes]), ("medium", str | None)], **event
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], **event)
    fields = [
        ("ts", float), ("events", list[stored | removed | cleared]),
        ("data_parallel_rank", int | None, None),
    ]  # fmt: skip
    return msgspec.defstruct("KVEventBatch", fields, omit_defaults=True, gc=False, **form)


ARRAYS, MAPS = structures(array_like=True), structures()


class VllmMirror:
    """What a router that knows vLLM's events believes to be cached."""

    def __init__(self, batch: Any = ARRAYS) -> None:
        self._decode = msgspec.msgpack.Decoder(batch).decode
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.adapters: set[str | None] = set()
        self.cleared = 0

    def take(self, payload: bytes) -> None:
        batch = self._decode(payload)
        assert abs(batch.ts - time.time()) < 600
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    assert event.medium == "GPU"
                    parent, size = event.parent_block_hash, event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    for index, block in enumerate(event.block_hashes):
                        tokens = tuple(event.token_ids[size * index : size * (index + 1)])
                        assert parent is None or parent in self.blocks
                        self.blocks[block] = parent, tokens
                        parent = block
                    self.adapters.add(event.lora_name)
                case "BlockRemoved":
                    for block in event.block_hashes:
                        del self.blocks[block]
                case _:
                    self.blocks.clear()
                    self.cleared += 1


def expected(tree: RadixTree, block_size: int) -> set[int]:
    return {
        block
        for namespace, root in tree.roots.items()
        for node in root.subtree()
        for block in page_hashes(node.prefix(), block_size, namespace)
    }


def held(copy: TreeCopy) -> set[tuple[int, bytes]]:
    return {(namespace, tokens) for namespace, tokens in copy}


def in_tree(tree: RadixTree) -> set[tuple[int, bytes]]:
    return {
        (namespace_key(namespace), node.prefix())
        for namespace, root in tree.roots.items()
        for node in root.subtree()
        if node is not root and not node.children
    }


def publisher(endpoint: str, replay: str | None, **options: Any) -> Publisher:
    given = {"topic": "kv", "exact_topic": "exact", "block_size": 5, "maps": False, **options}
    return Publisher(Published(endpoint, replay, **given))


def settle(sender: Publisher) -> None:
    """Waits until what was put is published, or is so before the next request is answered."""
    while sender.waiting or sender.behind or sender.broken:
        time.sleep(0.001)


@pytest.mark.parametrize("maps", [False, True])
def test_mirrors_agree_with_the_tree_under_fuzz(address: Address, context: Any, maps: bool) -> None:
    endpoint, replay = address(), address()
    sender = publisher(endpoint, replay, maps=maps)
    blocks, exact = Listener(context, endpoint, b"kv"), Listener(context, endpoint, b"exact")
    fuzz = Fuzz("lru", 4, seed=11)
    changes = attached(fuzz.tree)
    mirror, copy, numbers = VllmMirror(MAPS if maps else ARRAYS), TreeCopy(), [-1, -1]
    time.sleep(0.2)  # until both have subscribed
    for step in range(600):
        fuzz.step()
        sender.put(changes.drain(), None)
        if step % 200 < 199:
            continue
        for place, (listener, request) in enumerate(((blocks, ()), (exact, (b"exact",)))):
            settle(sender)
            messages = listener.up_to_now(context, replay, *request, after=numbers[place])
            # On a busy machine it may not have subscribed yet: it asks for what it missed.
            if numbers[place] < 0 and (not messages or messages[0][0] > 0):
                missed = ask(context, replay, *request, (0).to_bytes(8, "big"))
                messages = missed[: messages[0][0] if messages else None] + messages
            for number, payload in messages:
                assert number == numbers[place] + 1
                numbers[place] = number
                if listener is blocks:
                    mirror.take(payload)
                else:
                    for change in read_changes(payload)[2]:
                        copy.apply(change)
        assert set(mirror.blocks) == expected(fuzz.tree, 5)
        assert held(copy) == in_tree(fuzz.tree)
        query = fuzz.prompt()
        for namespace in NAMESPACES:
            wanted = fuzz.tree.match(query, namespace).length
            assert copy.match(query, namespace_key(namespace)) == wanted
    sender.close()


def test_who_comes_late_asks_for_a_snapshot(address: Address, context: Any) -> None:
    endpoint, replay = address(), address()
    sender = publisher(endpoint, replay)
    fuzz = Fuzz("lru", 1, seed=2)
    changes = attached(fuzz.tree)
    for _ in range(300):
        fuzz.step()
        sender.put(changes.drain(), None)
    settle(sender)
    ((number, payload),) = ask(context, replay, b"exact", SNAPSHOT)
    copy = TreeCopy()
    for change in read_changes(payload)[2]:
        copy.apply(change)
    assert held(copy) == in_tree(fuzz.tree)
    later = Listener(context, endpoint, b"exact")
    time.sleep(0.2)
    for _ in range(50):  # what comes next fits to it
        fuzz.step()
        sender.put(changes.drain(), None)
    settle(sender)
    for after, payload in later.up_to_now(context, replay, b"exact", after=number):
        number += 1
        assert after == number
        for change in read_changes(payload)[2]:
            copy.apply(change)
    assert held(copy) == in_tree(fuzz.tree)
    mirror = VllmMirror()
    ((_, payload),) = ask(context, replay, SNAPSHOT)
    mirror.take(payload)
    assert set(mirror.blocks) == expected(fuzz.tree, 5)
    assert ask(context, replay, b"nonsense") == []
    sender.close()


def test_messages_that_are_not_kept_any_more_come_as_a_snapshot(
    address: Address, context: Any
) -> None:
    endpoint, replay = address(), address()
    sender = publisher(endpoint, replay, kept_batches=3)
    tree = RadixTree(PagePool(64, 1))
    changes = attached(tree)
    for number in range(8):
        hold, table = tree.start(tree.match([number, 1, 2, 3, 4]))
        table += tree.allocate(5)
        tree.finish(hold, [number, 1, 2, 3, 4], table)
        sender.put(changes.drain(), None)
    settle(sender)
    mirror = VllmMirror()
    for _, payload in ask(context, replay, (0).to_bytes(8, "big")):
        mirror.take(payload)
    assert set(mirror.blocks) == expected(tree, 5) and len(mirror.blocks) == 8
    sender.close()


def test_a_listener_that_never_reads_delays_nobody(address: Address, context: Any) -> None:
    """It loses messages, sees by their numbers which, and gets these from the replay endpoint."""
    endpoint, replay = address(), address()
    sender = publisher(endpoint, replay, waiting_batches=50)
    idle, reader = Listener(context, endpoint, b"kv", most=1), Listener(context, endpoint, b"kv")
    tree = RadixTree(PagePool(100_000, 1))
    changes, rng = attached(tree), random.Random(0)
    heard: list[tuple[int, bytes]] = []
    sent = 0  # the number of the last batch; that of 0 says that the cache is empty
    while sent < 1200:
        tokens = [rng.randrange(1 << 30) for _ in range(2000)]
        hold, table = tree.start(tree.match(tokens))
        table += tree.allocate(2000 - len(table))
        tree.finish(hold, tokens, table)
        sender.put(changes.drain(), None)
        sent += 1
        if not heard:  # it may not have subscribed yet
            heard += reader.until_quiet(0.05)
        elif sent % 20 == 0:  # as fast as one listener reads
            while heard[-1][0] < sent:
                heard.append(reader.next())
    assert not sender.behind
    few = idle.until_quiet()
    assert 0 < len(few) < 1000, "the system's buffers held all"
    assert len(heard) > 1000
    mirrors = []
    for found in (dict(heard), dict(few)):
        while missing := set(range(sent + 1)) - found.keys():
            found |= dict(ask(context, replay, min(missing).to_bytes(8, "big")))
        mirrors.append(VllmMirror())
        for number in range(sent + 1):
            mirrors[-1].take(found[number])
    assert set(mirrors[0].blocks) == expected(tree, 5)
    assert mirrors[1].blocks == mirrors[0].blocks
    sender.close()


def test_versions_of_an_adapter_have_its_name_and_are_told_apart() -> None:
    stored = []
    for version in ("0123456789abcdef", "fedcba9876543210"):
        changes = [
            Opened(1, Namespace("m", f"legal@{version}")),
            Stored(2, 1, 0, array("i", range(5)).tobytes()),
        ]
        blocks = Blocks(5)
        events = [event for event in map(blocks.take, changes) if event is not None]
        batch = msgspec.msgpack.Decoder(MAPS).decode(block_batch(0.0, events, 5, maps=True))
        stored += batch.events
    assert [event.lora_name for event in stored] == ["legal", "legal"]
    for values in ([event.extra_keys[0][0] for event in stored], [e.block_hashes for e in stored]):
        assert values[0] != values[1]


def start(path: Path, endpoint: str, replay: str | None = None, **options: Any) -> Engine:
    return Engine(
        EngineConfig(
            str(path), kv_cache_tokens=256, page_size=16, max_num_seqs=4,
            max_num_batched_tokens=32, kv_events_endpoint=endpoint,
            kv_events_replay_endpoint=replay, kv_events_exact_topic="exact",
            kv_events_block_size=8, **options,
        )
    )  # fmt: skip


def sender_of(engine: Engine) -> Publisher:
    return engine.events._streams[0].sink


def run(engine: Engine, prompts: list[list[int]], **more: Any) -> None:
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, PARAMS, **more)
    while engine.has_unfinished():
        engine.step()
    settle(sender_of(engine))


def test_an_engine_publishes_its_cache_and_its_load(
    tiny_checkpoint: Callable[..., Path], address: Address, context: Any
) -> None:
    endpoint, replay = address(), address()
    engine = start(tiny_checkpoint("llama"), endpoint, replay)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 320) for _ in range(30)] for _ in range(12)]
    run(engine, prompts)
    run(engine, prompts[:2], cache_salt="secret", tenant="a")
    mirror, copy, loads = VllmMirror(), TreeCopy(), []
    for _, payload in ask(context, replay, (0).to_bytes(8, "big")):
        assert b"secret" not in payload
        mirror.take(payload)
    for _, payload in ask(context, replay, b"exact", (0).to_bytes(8, "big")):
        assert b"secret" not in payload
        for change in read_changes(payload)[2]:
            if isinstance(change, dict):
                loads.append(change)
            else:
                copy.apply(change)
    assert set(mirror.blocks) == expected(engine.tree, 8)
    assert held(copy) == in_tree(engine.tree)
    assert loads[-1]["running_requests"] == loads[-1]["waiting_tokens"] == 0
    assert any(each["waiting_requests"] + each["running_requests"] for each in loads)
    assert loads[-1]["prefill_tokens_a_second"] > 0 < loads[-1]["decode_step_seconds"]
    engine.reset_cache()
    engine.events.flush()
    settle(sender_of(engine))
    ((_, payload),) = ask(context, replay, SNAPSHOT)
    mirror.take(payload)
    assert not mirror.blocks
    engine.close()


def test_sleep_and_another_engine_begin_anew(
    tiny_checkpoint: Callable[..., Path], address: Address, context: Any
) -> None:
    endpoint, replay = address(), address()
    path = tiny_checkpoint("llama")
    engine = start(path, endpoint, replay)
    listener, mirror = Listener(context, endpoint, b"exact"), VllmMirror()
    run(engine, [list(range(3, 33))])
    engine.sleep()
    engine.wake_up()
    run(engine, [list(range(5, 35))])
    mirror.take(ask(context, replay, SNAPSHOT)[0][1])
    assert set(mirror.blocks) == expected(engine.tree, 8)
    engine.close()
    (*_, (_, before)) = listener.until_quiet()
    again = start(path, endpoint, replay)  # the address is free
    end = time.monotonic() + 20
    messages = []
    while not messages and time.monotonic() < end:  # until the listener has connected again
        run(again, [list(range(3, 33))])
        messages = listener.until_quiet(0.2)
    _, after = messages[0]
    assert read_changes(after)[1] != read_changes(before)[1], "another instance"
    copy = TreeCopy()
    for change in read_changes(ask(context, replay, b"exact", SNAPSHOT)[0][1])[2]:
        copy.apply(change)
    assert held(copy) == in_tree(again.tree)
    again.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events_endpoint": "127.0.0.1:5557"}, r"kv_events_endpoint must be tcp://HOST:PORT"),
        ({"kv_events_endpoint": "tcp://*:99999"}, "kv_events_endpoint must be tcp://HOST:PORT"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_replay_endpoint": "tcp://*:1"},
         "kv_events_replay_endpoint must differ from kv_events_endpoint"),
        ({"kv_events_replay_endpoint": "tcp://*:1"},
         "kv_events_replay_endpoint is 'tcp://\\*:1'; without kv_events_endpoint it must be None"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_block_size": 0},
         "kv_events_block_size must be an integer of at least 1, got 0"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_encoding": "json"},
         "kv_events_encoding must be one of arrays, maps, got 'json'"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_exact_topic": ""},
         "kv_events_exact_topic must be a text that is neither empty nor kv_events_topic"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("m", **options)


def test_an_address_in_use_is_refused(
    tiny_checkpoint: Callable[..., Path], address: Address
) -> None:
    endpoint = address()
    engine = start(tiny_checkpoint("llama"), endpoint)
    with pytest.raises(ValueError, match="must be an address of this machine that is free"):
        start(tiny_checkpoint("llama"), endpoint)
    with pytest.raises(ValueError, match=f"kv_events_replay_endpoint is '{endpoint}'"):
        start(tiny_checkpoint("llama"), address(), endpoint)
    engine.close()


def test_a_broken_batch_is_refused() -> None:
    for wrong in (b"", b"\x93", msgspec.msgpack.encode([1.0, "a", [["unknown", 1]]])):
        with pytest.raises(ValueError, match="it is no batch of changes"):
            read_changes(wrong)
    assert array("i", [1]).itemsize == 4
