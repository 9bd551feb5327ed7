"""Compares the policies of eviction on traces, parts of traces, and made-up shifts of behaviour.

    python benchmarks/policies.py [--trace FILE ...] [--only NAME ...] [--pool TOKENS ...]
                                  [--policy NAME ...] [--page-size N] [--json FILE] [--quick]
    python benchmarks/policies.py --list [--trace FILE ...]

A file is in Mooncake's format. From each come five traces: all of it, its halves by time and its
halves by conversation; from two files also one after the other and stretches of both in turn. The
made-up traces (`common/reuse_workloads.py`) need no file: a fixed popularity, loops, prompts that
never return, conversations, agents, tenants, and shifts from one to another in the middle.

Each request goes through the trees of all policies in turn, so that their times compare. A row has:

    hit_rate     hit tokens over prompt tokens, in percent, by policy
    x_lru        time of all requests in the tree as a multiple of LRU's, by policy
    best         the best of the others
    short        points of hit rate by which `adaptive` is below it (negative: above)

The last row counts the traces and sizes at which `adaptive` is at most 0.2 points below.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.harness import Rows, parser, processor
from common.reuse_workloads import Trace, after_each_other, in_turn, made_of, made_up, read
from common.tree_workloads import work_of
from coppice.radix import POLICIES, PagePool, RadixTree, compiled
from tree import serve

OURS = "adaptive"
NEAR = 0.2  # points
PARTS = ("first half", "second half", "even families", "odd families")


def traces_of(files: list[Path]) -> dict[str, Callable[[], Trace]]:
    """Traces by name; none is read or made before it is asked for."""
    found = made_up()
    for file in files:
        found[file.stem] = partial(read, file)
        for part in PARTS:
            found[f"{file.stem}, {part}"] = partial(_part, file, part)
    for one, other in pairwise(files):
        found[f"{one.stem}>{other.stem}"] = partial(_joined, after_each_other, one, other)
        found[f"{other.stem}>{one.stem}"] = partial(_joined, after_each_other, other, one)
        found[f"{one.stem}|{other.stem}"] = partial(_joined, _in_turn, one, other)
    return found


def _part(file: Path, part: str) -> Trace:
    return made_of(read(file))[part]


def _joined(join: Callable[[Trace, Trace], Trace], one: Path, other: Path) -> Trace:
    return join(read(one)[:4000], read(other)[:4000])


def _in_turn(one: Trace, other: Trace) -> Trace:
    return in_turn(one, other, 500)


def measure(trace: Trace, pool: int, policies: list[str], page_size: int) -> dict[str, Any]:
    """Sends all requests through a tree of each policy, but those larger than the pool."""
    trees = {name: RadixTree(PagePool(-(-pool // page_size), page_size), name) for name in policies}
    seconds = dict.fromkeys(policies, 0.0)
    hits = dict.fromkeys(policies, 0)
    prompt_tokens = fresh = requests = 0
    for blocks, prompt, output in trace:
        if (prompt + output) // page_size + 2 > pool // page_size:
            continue
        work = work_of(blocks, prompt, output, fresh)
        fresh += output
        prompt_tokens += prompt
        requests += 1
        for name, tree in trees.items():
            start = time.perf_counter()
            hits[name] += serve(tree, work)[1]
            seconds[name] += time.perf_counter() - start
    row: dict[str, Any] = {
        "requests": requests,
        "hit_rate": {name: round(100 * hits[name] / prompt_tokens, 2) for name in policies},
    }
    if "lru" in policies:
        row["x_lru"] = {name: round(seconds[name] / seconds["lru"], 2) for name in policies}
    others = {name: rate for name, rate in row["hit_rate"].items() if name != OURS}
    if OURS in policies and others:
        row["best"] = max(others, key=others.__getitem__)
        row["short"] = round(others[row["best"]] - row["hit_rate"][OURS], 2)
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", nargs="+", type=Path, default=[], metavar="FILE")
    options.add_argument("--only", nargs="+", metavar="NAME", help="these traces; default: all")
    options.add_argument("--list", action="store_true", help="print the names of the traces")
    options.add_argument("--pool", nargs="+", type=int, metavar="TOKENS")
    options.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    options.add_argument("--page-size", type=int, default=16)
    args = options.parse_args()
    traces = traces_of(args.trace)
    if args.list:
        print("\n".join(traces))
        return
    for name in args.only or ():
        if name not in traces:
            options.error(f"--only {name!r} is none of {', '.join(map(repr, traces))}")
    pools = args.pool or (
        [1_000_000] if args.quick else [300_000, 1_000_000, 3_000_000, 10_000_000]
    )
    rows = Rows(args.json)
    short = []
    for name in args.only or traces:
        trace = traces[name]()
        if args.quick:
            trace = trace[:500]
        for pool in pools:
            row = measure(trace, pool, args.policy, args.page_size)
            if "short" in row:
                short.append(row["short"])
            rows.add(
                benchmark="policies",
                trace=name,
                pool_tokens=pool,
                page_size=args.page_size,
                **row,
                compiled=compiled.in_use("coppice.radix"),
                machine=processor(),
            )
    if short:
        near = sum(points <= NEAR for points in short)
        rows.add(benchmark="policies, all", cases=len(short), near=near, most_short=max(short))


if __name__ == "__main__":
    main()
