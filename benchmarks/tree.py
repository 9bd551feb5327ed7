"""Measures the radix tree alone, without a model or torch, on six workloads.

    python benchmarks/tree.py [--workload A..F ...] [--pool TOKENS ...] [--policy NAME ...]
                              [--page-size N] [--trace FILE] [--without-accounts]
                              [--json FILE] [--quick]
    python benchmarks/tree.py --evict [--json FILE]

For each request it calls the tree as an engine does: match, lock, claim or copy the tail page,
allocate (which may evict), insert the prompt, allocate and insert the output, release, and record
all that in the accounts. Requests run one after another. A row has:

    x_reference              a request's time as a multiple of a fixed loop's (see below): mean,
                             median and 99th percentile
      settling               the work of the accounts between two requests, on average a request
      with_settling          the mean with that work
      settling_slice         the longest piece of that work
    accounts_share           the part of the mean that the accounts take
    evict_x_reference        an allocation that evicts
    hit_rate                 hit tokens over prompt tokens
    bytes_a_cached_token     growth of the process's resident memory, by cached token
    bytes_without_free_heap  the same after the C library (glibc only) returned its free memory
    compiled                 whether the tree is compiled (COPPICE_PURE_PYTHON=1: it is not)

Requests come as fast as the tree takes them, so that the accounts settle some of them, and a
sample of tokens for the rest. They only log while a request waits. They process the log in batches
when none waits: in an engine while a device computes, here between two requests.

Memory is measured in a process for each row. Before the tree is made, that process generates all
requests once and serves a few by another tree, so that neither prompts nor lazily loaded libraries
count. Prompts and edges that were freed leave gaps in the heap, hence the second number.

Absolute times change from machine to machine and from hour to hour. So each row also times a fixed
loop of memory comparisons and dictionary lookups (`reference_loop`), before and after the requests.

The workloads:

    A   5,000 requests of 2,048 shared and 256 own tokens
    B   200 conversations of 10 turns that grow by 300 tokens
    C   a tree of thoughts, depth 6, fan-out 4, segments of 128 tokens: 5,000 random revisits
    D   a pool of 200,000 tokens, a working set of a million in 500 documents, Zipf popularity
    E   50 documents of 100,000 tokens, 20 questions of 100 tokens to each
    F   a trace of real requests (Mooncake's conversation trace, FAST'25), given by --trace; each
        hash id stands for 512 tokens

`--evict` evicts single pages from trees of 1,000 and of 100,000 leaves, in turn, instead.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from common.harness import Rows, parser, processor, spread
from common.tree_workloads import TOKEN_BYTES, Work, requests_of, tokens
from coppice.radix import Accounting, Hold, PagePool, RadixTree, RequestAccount, compiled


class Accounts:
    """Keeps the accounts of a tree as an engine does, and times them.

    With `apart` requests come so many seconds apart, by a clock of their own; else when they do.
    """

    def __init__(self, pool_tokens: int, apart: float | None = None) -> None:
        self.seconds = 0.0  # while requests wait
        self.settling = array("d")  # seconds of each batch between requests
        self._apart = apart
        self._now = 0.0 if apart else time.perf_counter()
        self.accounting = Accounting(pool_tokens, now=self._now)
        self._account: RequestAccount | None = None

    def admitted(self, prompt: bytes, hold: Hold) -> None:
        start = time.perf_counter()
        self._now = start if self._apart is None else self._now + self._apart
        self._account = self.accounting.request(
            prompt,
            None,
            hold.length,
            node=hold.node,
            now=self._now,
        )
        self.seconds += time.perf_counter() - start

    @property
    def now(self) -> float:
        """The time of the last request."""
        return self._now

    def finished(self, output: bytes) -> None:
        start = time.perf_counter()
        assert self._account is not None
        self.accounting.finish(self._account, output, now=self._now)
        self.seconds += time.perf_counter() - start

    def between(self, *, everything: bool = False) -> None:
        """Processes a batch of the log, or all of it, while no request waits."""
        start = time.perf_counter()
        if everything:
            self.accounting.settle()
        elif not self.accounting.settle_batch():
            return
        self.settling.append(time.perf_counter() - start)


class Evictions:
    """Counts and times the allocations that have to evict."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0

    def allocate(self, tree: RadixTree, count: int, after: int = -1) -> array[int]:
        if count <= tree.pool.free_pages:
            return tree.allocate(count, after)
        start = time.perf_counter()
        pages = tree.allocate(count, after)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return pages


def serve(
    tree: RadixTree,
    work: Work,
    accounts: Accounts | None = None,
    evictions: Evictions | None = None,
) -> tuple[int, int]:
    """Sends one request through the tree; returns its prompt tokens and its hit tokens."""
    evictions = evictions or Evictions()
    size = tree.page_size
    prompt = work.prompt
    length = len(prompt) // TOKEN_BYTES
    match = tree.match(prompt, limit=length - 1)  # the last token's logits are needed
    hold, table = tree.start(match)
    if accounts is not None:
        accounts.admitted(prompt, hold)
    if match.length % size and not tree.claim_tail(hold):
        table[-1] = evictions.allocate(tree, 1)[0]
    _grow(tree, table, length, evictions)
    if work.output:
        tree.insert(hold, prompt, table)
        _grow(tree, table, length + len(work.output) // TOKEN_BYTES, evictions)
        tree.finish(hold, work.output, table, begin=length)
    else:
        tree.finish(hold, prompt, table)
    if accounts is not None:
        accounts.finished(work.output)
    return length, match.length


def _grow(tree: RadixTree, table: array[int], length: int, evictions: Evictions) -> None:
    missing = -(-length // tree.page_size) - len(table)
    if missing > 0:
        table += evictions.allocate(tree, missing, table[-1] if table else -1)


def reference_loop() -> float:
    """Milliseconds of a fixed loop that compares 8 KiB and looks up a dictionary 100 times."""
    left, right = bytes(range(256)) * 32, bytes(range(256)) * 32
    table = {number.to_bytes(4, "little"): number for number in range(1000)}
    times = []
    for _ in range(200):
        start = time.perf_counter()
        for number in range(0, 400, 4):
            if left.startswith(right) and left[number : number + 4] in table:
                continue
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def warm_up() -> None:
    """Serves a few requests by a small tree, so that libraries load what they load lazily."""
    tree, accounts = RadixTree(PagePool(4096, 16)), Accounts(65536)
    for number in range(40):
        shared = tokens(number % 7, 3000)[: TOKEN_BYTES * (2000 + 10 * number)]
        work = Work(shared + tokens(100 + number, 100), tokens(500 + number, 20))
        serve(tree, work, accounts)
    accounts.between(everything=True)


def trim_heap() -> bool:
    """Returns free parts of the heap to the system; False if the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) >= 0


def measure(
    workload: str,
    options: tuple[Path | None, bool],
    pool_tokens: int,
    policy: str,
    page_size: int,
    with_accounts: bool,
) -> dict[str, Any]:
    """Runs all requests through a fresh tree; returns a row's figures."""
    # Requests are generated once without a tree: what that leaves in memory is not the tree's.
    most = sum(
        (len(work.prompt) + len(work.output)) // TOKEN_BYTES + 2 * page_size
        for work in requests_of(workload, *options)
    )
    pool_tokens = pool_tokens or most  # no workload inserts more, partly filled pages included
    warm_up()
    gc.collect()
    trim_heap()
    before = resident()
    tree = RadixTree(PagePool(-(-pool_tokens // page_size), page_size), policy=policy)
    accounts = Accounts(pool_tokens) if with_accounts else None
    evictions = Evictions()
    times = array("d")
    prompt_tokens = hit_tokens = 0
    references = [reference_loop()]
    for work in requests_of(workload, *options):
        start = time.perf_counter()
        length, hit = serve(tree, work, accounts, evictions)
        times.append(time.perf_counter() - start)
        prompt_tokens += length
        hit_tokens += hit
        if accounts is not None:
            accounts.between()
    if accounts is not None:
        accounts.between(everything=True)
    references.append(reference_loop())
    gc.collect()
    grown = resident() - before
    trimmed = resident() - before if trim_heap() else None
    reference = statistics.mean(references)
    milliseconds = np.array(times) * 1e3
    figures = {
        "mean": float(milliseconds.mean()),
        "p50": float(np.percentile(milliseconds, 50)),
        "p99": float(np.percentile(milliseconds, 99)),
    }
    if accounts is not None:
        settling = sum(accounts.settling) * 1e3 / len(times)
        figures |= {
            "settling": settling,
            "with_settling": figures["mean"] + settling,
            "settling_slice": max(accounts.settling) * 1e3,
        }
    evict_us = evictions.seconds / evictions.calls * 1e6 if evictions.calls else None
    return {
        "compiled": compiled.in_use("coppice.radix"),
        "requests": len(times),
        "hit_rate": round(hit_tokens / prompt_tokens, 4),
        "x_reference": {name: round(value / reference, 2) for name, value in figures.items()},
        "accounts_share": accounts and round(accounts.seconds / sum(times), 3),
        "evict_calls": evictions.calls,
        "evict_x_reference": evict_us and round(evict_us / 1e3 / reference, 3),
        "bytes_a_cached_token": round(grown / tree.cached_tokens, 2),
        "bytes_without_free_heap": trimmed and round(trimmed / tree.cached_tokens, 2),
        "cached_tokens": tree.cached_tokens,
        "nodes": tree.num_nodes,
        "times": {
            "ms_a_request": {name: round(value, 4) for name, value in figures.items()},
            "evict_us": evict_us and round(evict_us, 1),
            "reference_ms": round(reference, 4),
        },
    }


def tree_of_leaves(leaves: int, policy: str) -> RadixTree:
    """A tree of `leaves` leaves of 4 pages each, 100 below each node of one shared page."""
    tree = RadixTree(PagePool(5 * leaves, 16), policy=policy)
    stems = np.random.default_rng(0).integers(0, 2**31, (leaves // 100, 16), np.int32)
    own = np.random.default_rng(1).integers(0, 2**31, (leaves, 64), np.int32)
    for leaf in range(leaves):
        work = Work(stems[leaf % len(stems)].tobytes() + own[leaf].tobytes())
        serve(tree, work)
    return tree


def measure_evictions(policy: str, quick: bool) -> dict[str, Any]:
    """Times single-page evictions from a small and a large tree in turn."""
    sizes = (1_000, 10_000 if quick else 100_000)
    trees = [tree_of_leaves(size, policy) for size in sizes]
    gc.collect()
    rounds = 20
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for tree, spent in zip(trees, times, strict=True):
            start = time.perf_counter()
            for _ in range(100):
                tree.evict(1)
            spent.append((time.perf_counter() - start) / 100 * 1e6)
    ratios = [large / small for small, large in zip(*times, strict=True)]
    return {
        "leaves": sizes,
        "compiled": compiled.in_use("coppice.radix"),
        "evictions": 100 * rounds,
        "large_over_small": spread(ratios, 2),
        "times": {f"us_at_{size}": spread(spent) for size, spent in zip(sizes, times, strict=True)},
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workload", nargs="+", choices="ABCDEF", default=list("ABCDE"))
    options.add_argument(
        "--pool", nargs="+", type=int, metavar="TOKENS", help="0: large enough to evict nothing"
    )
    options.add_argument("--policy", nargs="+", default=["lru"])
    options.add_argument("--page-size", type=int, default=16)
    options.add_argument("--trace", type=Path, help="the trace of workload F")
    options.add_argument("--without-accounts", action="store_true")
    options.add_argument("--evict", action="store_true", help="time evictions at many leaves")
    args = options.parse_args()
    if "F" in args.workload and args.trace is None:
        options.error("--workload F needs --trace FILE")
    pools = {"D": [200_000], "F": [1_000_000, 3_000_000, 10_000_000, 0]}
    rows = Rows(args.json)
    if args.evict:
        for policy in args.policy:
            figures = measure_evictions(policy, args.quick)
            rows.add(benchmark="tree eviction", policy=policy, **figures, machine=processor())
        return
    options_of_all = (args.trace, args.quick)
    for name in args.workload:
        for pool in args.pool or pools.get(name, [0]):
            for policy in args.policy:
                row = {"workload": name, "pool_tokens": pool or "unlimited", "policy": policy}
                what = (name, options_of_all, pool, policy, args.page_size)
                # A new process for each row: memory that an earlier row left does not count.
                with multiprocessing.get_context("spawn").Pool(1) as process:
                    figures = process.apply(measure, (*what, not args.without_accounts))
                row["page_size"] = args.page_size
                rows.add(benchmark="tree", **row, **figures, machine=processor())


if __name__ == "__main__":
    main()
