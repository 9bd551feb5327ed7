"""What publishing a tree's events costs the tree, with a consumer attached.

    python benchmarks/events.py [--json FILE] [--quick]

Two trees serve the same requests of workloads A to D of `benchmarks/tree.py`, in turns of 200, in
one process. One publishes its changes (`kv_events_endpoint`, with both topics) every eight
requests, as an engine does after a step, and a consumer in another process hears all of them and
copies the tree. After each step of either side 24 MB are read, without Python's lock, as an engine
reads weights; meanwhile the publisher's thread sends. A row has, as medians over the turns with the
middle half:

    wall     seconds of the steps, publishing included, with events over without
    sender   processor time of the publisher's thread, over that of the tree without events

Each side is first in every second turn.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import zmq

from common.harness import Rows, parser, processor
from common.tree_workloads import Work, requests_of
from coppice.radix import PagePool, RadixTree
from coppice.radix.mirror.changes import attached
from coppice.radix.mirror.copy import TreeCopy
from coppice.runtime.metrics.events.publisher import Publisher
from coppice.runtime.metrics.events.wire import read_changes
from tree import serve

TURN, STEP = 200, 8
WEIGHTS = np.ones(1 << 20)


def listen(endpoint: str, pipe: Connection) -> None:
    """Copies the tree until the other end says so; answers with the tokens that it holds."""
    context = zmq.Context()
    heard = context.socket(zmq.SUB)
    heard.set_hwm(0)
    heard.connect(endpoint)
    heard.setsockopt(zmq.SUBSCRIBE, b"")
    copy = TreeCopy()
    pipe.send("ready")
    while not pipe.poll():
        while heard.poll(50):
            topic, _, payload = heard.recv_multipart()
            if topic == b"exact":
                for change in read_changes(payload)[2]:
                    if not isinstance(change, dict):
                        copy.apply(change)
    pipe.send(sum(len(node.edge) // 4 for node in copy.nodes.values()))


class Side:
    """A tree, which publishes if there is a sender."""

    def __init__(self, pages: int, sender: Publisher | None) -> None:
        self.tree = RadixTree(PagePool(pages, 16))
        self._sender = sender
        self._changes = None if sender is None else attached(self.tree)

    def turn(self, works: Sequence[Work]) -> float:
        """Serves some requests in steps; returns the seconds of all steps."""
        taken = 0.0
        for first in range(0, len(works), STEP):
            started = time.perf_counter()
            for work in works[first : first + STEP]:
                serve(self.tree, work)
            if self._sender is not None and self._changes is not None:
                self._sender.put(self._changes.drain(), None)
            taken += time.perf_counter() - started
            for _ in range(3):
                WEIGHTS.sum()
        return taken


def quartiles(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"low": round(low, 3), "median": round(middle, 3), "high": round(high, 3)}


def measure(workload: str, quick: bool) -> dict[str, object]:
    works = list(requests_of(workload, None, quick))
    pages = 12_500 if workload == "D" else sum(len(work.prompt) for work in works) // 64 + 1000
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{found.getsockname()[1]}"
    pipe, theirs = multiprocessing.Pipe()
    consumer = multiprocessing.get_context("spawn").Process(target=listen, args=(endpoint, theirs))
    sender = Publisher(endpoint, None, topic="kv", exact_topic="exact", block_size=16, maps=False)
    consumer.start()
    assert pipe.recv() == "ready"
    time.sleep(0.3)
    sides = [Side(pages, None), Side(pages, sender)]
    wall: list[float] = []
    alone, before = 0.0, time.process_time() - time.thread_time()
    for number, first in enumerate(range(0, len(works) - TURN + 1, TURN)):
        part = works[first : first + TURN]
        took = {}
        for place in (0, 1) if number % 2 else (1, 0):
            took[place] = sides[place].turn(part)
        wall.append(took[1] / took[0])
        alone += took[0]
    while sender.waiting:
        time.sleep(0.01)
    others = time.process_time() - time.thread_time() - before
    time.sleep(0.5)
    pipe.send("end")
    assert pipe.recv() == sides[1].tree.cached_tokens, "the copy is not the tree"
    consumer.join()
    sender.close()
    assert threading.active_count() < 10
    return {
        "wall": quartiles(wall), "sender": round(others / alone, 2),
        "requests": len(works),
    }  # fmt: skip


def main() -> None:
    args = parser(__doc__).parse_args()
    rows = Rows(args.json)
    for workload in "ABCD":
        found = measure(workload, args.quick)
        rows.add(benchmark="events", workload=workload, **found, **processor())


if __name__ == "__main__":
    main()
