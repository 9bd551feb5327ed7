"""What publishing a tree's events costs the tree, with a consumer attached.

    python benchmarks/events.py [--workload A..D ...] [--rounds N] [--json FILE] [--quick]

Two trees serve the same requests of workloads A to D of `benchmarks/tree.py`, in turns of 200, in
one process. One publishes its changes (`kv_events_endpoint`, with both topics) as an engine does,
which calls `KvEvents.flush` after a step, here after every eight requests; a consumer in another
process hears all of them and copies the tree. After each step of either side 24 MB are read,
without Python's lock, as an engine reads weights; meanwhile a thread hands the log to the
publisher's process. A row has:

    least    seconds of the steps, publishing included, with events over without: of each turn the
             least of all rounds, since other work only adds time, and the sum of all turns
    wall     the same as a median over the turns of all rounds, with the middle half; `rounds` has
             each round's median
    thread   `wall` by the processor time of the engine's thread, which other processes disturb
             less, but in which waiting for Python's lock does not count
    sender   processor time of the thread that hands the log over, over that of the tree alone
    process  that of the publisher's process, likewise

Each side is first in every second turn. `--without-sender` attaches the log alone, and throws away
what would be published. The reads leave nothing of tree and log in the processor's caches; with
`--warm` they read 24 KB as often, so that both remain there, as between steps of a device.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq

from common.harness import Rows, parser, processor
from common.tree_workloads import Work, requests_of
from coppice.radix import PagePool, RadixTree, compiled
from coppice.radix.mirror.copy import TreeCopy
from coppice.radix.mirror.records import Records
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.metrics.events.options import Published
from coppice.runtime.metrics.events.publisher import Publisher
from coppice.runtime.metrics.events.stream import KvEvents, Sink
from coppice.runtime.metrics.events.wire import read_changes
from tree import serve

TURN, STEP = 200, 8
_LAST_WAIT = 1000  # milliseconds without a message after which there is none, at the end
WEIGHTS, FEW = np.ones(1 << 20), np.ones(1 << 10)


def listen(endpoint: str, pipe: Connection) -> None:
    """Copies the tree until the other end says so; answers with the tokens that it holds."""
    context = zmq.Context()
    heard = context.socket(zmq.SUB)
    heard.set_hwm(0)
    heard.connect(endpoint)
    heard.setsockopt(zmq.SUBSCRIBE, b"")
    copy = TreeCopy()
    pipe.send("ready")
    patience = 50  # milliseconds
    while patience < _LAST_WAIT:
        patience = _LAST_WAIT if pipe.poll() else 50
        while heard.poll(patience):
            topic, _, payload = heard.recv_multipart()
            if topic == b"exact":
                for change in read_changes(payload)[2]:
                    if not isinstance(change, dict):
                        copy.apply(change)
    pipe.send(sum(len(node.edge) // 4 for node in copy.nodes.values()))


class Nowhere:
    """Takes what would be published, and throws it away; asks for more after each step."""

    asks = True
    behind = broken = False

    def put(self, records: Records, load: Load | None, /) -> None:
        pass

    def close(self) -> None:
        pass


class Side:
    """A tree, whose changes `sink` gets, if there is one."""

    def __init__(self, pages: int, sink: Sink | None, warm: bool) -> None:
        self.tree = RadixTree(PagePool(pages, 16))
        self._read = FEW if warm else WEIGHTS
        self.events = None if sink is None else KvEvents(sink, self.tree, None)

    def turn(self, works: Sequence[Work]) -> tuple[float, float]:
        """Serves some requests in steps; the seconds of all steps, and those of this thread."""
        wall = processor_time = 0.0
        for first in range(0, len(works), STEP):
            used, started = time.thread_time(), time.perf_counter()
            for work in works[first : first + STEP]:
                serve(self.tree, work)
            if self.events is not None:
                self.events.flush(idle=False)
            wall += time.perf_counter() - started
            processor_time += time.thread_time() - used
            for _ in range(3):
                self._read.sum()
        return wall, processor_time


def quartiles(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"low": round(low, 3), "median": round(middle, 3), "high": round(high, 3)}


class Attached:
    """A publisher, and a consumer in another process that copies the tree.

    Attributes:
        last: seconds of the publisher's process at its end.
    """

    last = 0.0

    def __init__(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{found.getsockname()[1]}"
        self.sender = Publisher(Published(endpoint, topic="kv", exact_topic="exact"))
        self._pipe, theirs = multiprocessing.Pipe()
        spawned = multiprocessing.get_context("spawn")
        self._consumer = spawned.Process(target=listen, args=(endpoint, theirs))
        self._consumer.start()
        assert self._pipe.recv() == "ready"
        time.sleep(0.3)

    def seconds(self) -> float:
        """Processor time of the publisher's process."""
        stat = Path(f"/proc/{self.sender.process_id}/stat").read_text(encoding="ascii")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send_all(self, side: Side) -> None:
        """Waits until the process has got all changes."""
        assert side.events is not None
        side.events.flush(idle=True)
        while self.sender.waiting:
            time.sleep(0.01)

    def end(self, tree: RadixTree) -> None:
        """Checks that the consumer's copy is the tree."""
        self._pipe.send("end")
        assert self._pipe.recv() == tree.cached_tokens, "the copy is not the tree"
        self.last = self.seconds()
        self._consumer.join()
        self.sender.close()


def measure(
    workload: str, quick: bool, rounds: int, without_sender: bool, warm: bool
) -> dict[str, object]:
    works = list(requests_of(workload, None, quick))
    pages = 12_500 if workload == "D" else sum(len(work.prompt) for work in works) // 64 + 1000
    wall: list[list[float]] = []
    threads: list[float] = []
    least: dict[tuple[int, int], float] = {}  # seconds by turn and side
    alone = sender = process = 0.0
    for _ in range(rounds):
        published = None if without_sender else Attached()
        sink = published.sender if published else Nowhere()
        sides = [Side(pages, None, warm), Side(pages, sink, warm)]
        before = time.process_time() - time.thread_time()
        begun = published.seconds() if published else 0.0
        wall.append([])
        for number, first in enumerate(range(0, len(works) - TURN + 1, TURN)):
            took = {}
            for place in (0, 1) if number % 2 else (1, 0):
                took[place] = sides[place].turn(works[first : first + TURN])
                key = number, place
                least[key] = min(least.get(key, took[place][0]), took[place][0])
            wall[-1].append(took[1][0] / took[0][0])
            threads.append(took[1][1] / took[0][1])
            alone += took[0][1]
        if published is not None:
            published.send_all(sides[1])
            sender += time.process_time() - time.thread_time() - before
            published.end(sides[1].tree)
            process += published.last - begun
    ours, theirs = (sum(each for (_, at), each in least.items() if at == side) for side in (1, 0))
    return {
        "least": round(ours / theirs, 3),
        "wall": quartiles([each for one in wall for each in one]), "thread": quartiles(threads),
        "rounds": [round(statistics.median(one), 3) for one in wall],
        "sender": round(sender / alone, 2), "process": round(process / alone, 2),
        "requests": len(works), "compiled": compiled.in_use("coppice.radix"),
    }  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workload", nargs="+", choices="ABCD", default=list("ABCD"))
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--without-sender", action="store_true")
    options.add_argument("--warm", action="store_true")
    args = options.parse_args()
    rows = Rows(args.json)
    for workload in args.workload:
        found = measure(workload, args.quick, args.rounds, args.without_sender, args.warm)
        what = "the log alone" if args.without_sender else "a consumer"
        told = {"attached": what, "caches": "warm" if args.warm else "cold"}
        rows.add(benchmark="events", workload=workload, **told, **found, **processor())


if __name__ == "__main__":
    main()
