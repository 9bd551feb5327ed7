"""Measures the cache's accounts: their cost beside the tree, and the miss-ratio curve's accuracy.

    python benchmarks/accounting.py [--workload A..F ...] [--pool TOKENS] [--rounds N]
                                    [--trace FILE] [--json FILE] [--quick]
    python benchmarks/accounting.py --curve [--trace FILE] [--pool TOKENS] [--json FILE] [--quick]

The first form sends a workload of `tree.py` through a tree with accounts: one request a second,
where all are settled, and as fast as the tree takes them, where most causes come from a sample. A
row has medians over the rounds, as multiples of the time that the tree itself takes for a request:

    logging_over_tree    the accounts, while the request waits
    settling_over_tree   the accounts, between requests
    curve_over_tree      of these the miss-ratio curve, with all work that is done only for it
    accounts_over_tree   all of it
    curve_over_all       the curve, over the time of tree, logging and settling together

and for the causes that were estimated, as shares of all prompt tokens, in percent:

    standard_errors      those that the accounts state
    off                  what the estimate differs from one request a second by

The second form compares the curve with exact LRU stack distances of all blocks, on documents with
Zipf popularity and, if one is given, on a trace.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.harness import Rows, parser, processor
from common.tree_workloads import Work, requests_of, workload_f
from coppice.radix import PagePool, RadixTree
from coppice.radix.accounting.ledger import Accounting
from coppice.radix.accounting.miss_ratio import FACTORS
from coppice.radix.accounting.reuses import Reuses
from coppice.radix.accounting.seen.hashes import PrefixHasher, keys
from tree import Accounts, serve

PAGE_SIZE = 16
POOLS = {"D": 200_000}  # which evicts


PACES = {"one a second": 1.0, "at once": None}


def measure(requests: Iterator[Work], pool_tokens: int, apart: float | None) -> dict[str, Any]:
    tree = RadixTree(PagePool(-(-pool_tokens // PAGE_SIZE), PAGE_SIZE))
    accounts = Accounts(pool_tokens, apart)
    accounting = accounts.accounting
    in_curve = _timed(accounting._settler.uses)
    in_requests = 0.0
    count = 0
    for work in requests:
        start = time.perf_counter()
        serve(tree, work, accounts)
        in_requests += time.perf_counter() - start
        count += 1
        accounts.between()
    accounts.between(everything=True)
    in_tree, settling = in_requests - accounts.seconds, sum(accounts.settling)
    report = accounting.snapshot(now=accounts.now)
    counts = report.overall.since_start
    return {
        "logging_over_tree": accounts.seconds / in_tree,
        "settling_over_tree": settling / in_tree,
        "accounts_over_tree": (accounts.seconds + settling) / in_tree,
        "curve_over_tree": in_curve[0] / in_tree,
        "curve_over_all": in_curve[0] / (in_requests + settling),
        "times": {
            "tree_us": in_tree / count * 1e6,
            "logging_us": accounts.seconds / count * 1e6,
            "settling_us": settling / count * 1e6,
            "curve_us": in_curve[0] / count * 1e6,
            "longest_slice_us": max(accounts.settling) * 1e6,
        },
        "hit_rate": counts.hit_rate,
        "ideal_hit_rate": counts.ideal_hit_rate,
        "prompt_tokens": counts.prompt_tokens,
        "estimated_tokens": counts.estimated_tokens,
        "causes": counts.causes,
        "standard_errors": {
            name: round(error / counts.prompt_tokens * 100, 3)
            for name, error in counts.standard_errors.items()
        },
        "curve": {point.pool_tokens: round(point.hit_rate, 4) for point in report.curve},
        "bytes_a_pool_token": accounting.nbytes / pool_tokens,
    }


def _timed(uses: Reuses) -> list[float]:
    """A list of one number: the seconds that recording uses and reading the curve take from now."""
    spent = [0.0]

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments)
            spent[0] += time.perf_counter() - start
            return result

        return timed

    uses.record = wrap(uses.record)  # type: ignore[method-assign]
    uses.points = wrap(uses.points)  # type: ignore[method-assign]
    return spent


def compare(requests: Iterator[Work], pool_tokens: int) -> dict[str, Any]:
    """The curve as the accounts estimate it, and the exact one of the same blocks."""
    accounting = Accounting(pool_tokens, now=0.0, exact=True)
    size = accounting.block_tokens
    hasher = PrefixHasher(size)
    zero = np.zeros(1, np.int64)
    groups: list[tuple[list[int], int]] = []
    prompt_tokens = 0
    for work in requests:
        account = accounting.request(work.prompt, None, 0, now=0.0)
        accounting.finish(account, work.output, now=0.0)
        everything = work.prompt + work.output
        blocks = hasher.blocks([everything], zero, zero.astype(np.uint64), zero - 1)
        prefixes = keys(blocks.hashes, np.uint64(0))[blocks.full].tolist()
        groups.append((prefixes, account.prompt_tokens // size))
        prompt_tokens += account.prompt_tokens
    exact = exact_hits(groups, np.array(FACTORS) * pool_tokens / size) * size / prompt_tokens
    online = np.array([point.hit_rate for point in accounting.snapshot(now=0.0).curve])
    return {
        "pool_tokens": [round(factor * pool_tokens) for factor in FACTORS],
        "exact": exact.round(4).tolist(),
        "online": online.round(4).tolist(),
        "worst_points": round(float(np.abs(exact - online).max()) * 100, 2),
    }


def exact_hits(groups: list[tuple[list[int], int]], sizes: np.ndarray) -> np.ndarray:
    """The prompts' blocks that hit in an LRU pool of each of `sizes` blocks.

    A group is a sequence: the hashes of its blocks, and how many of them lie in its prompt; all of
    them are cached. Stack distances by a Fenwick tree over points in time (Bennett and Kruskal,
    1975), O(log n) a block.
    """
    total = sum(len(blocks) for blocks, _ in groups)
    sums = [0] * (total + 1)
    last: dict[int, int] = {}

    def add(at: int, value: int) -> None:
        while at <= total:
            sums[at] += value
            at += at & -at

    def until(at: int) -> int:
        value = 0
        while at:
            value += sums[at]
            at &= at - 1
        return value

    distances = []
    moment = 0
    for blocks, counted in groups:
        # The known blocks are a prefix; each was last used later than the one after it.
        for block in blocks[:counted]:
            if block not in last:
                break
            distances.append(len(last) - until(last[block]) + 1)
        for block in reversed(blocks):
            moment += 1
            if block in last:
                add(last[block], -1)
            last[block] = moment
            add(moment, 1)
    return np.searchsorted(np.sort(distances), sizes, side="right")


def zipf(quick: bool) -> Iterator[Work]:
    """Documents of various lengths, drawn by Zipf popularity, each with a fresh question."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, 3001) ** 0.9
    for number in rng.choice(3000, 2000 if quick else 12_000, p=weights / weights.sum()).tolist():
        document = np.random.default_rng(number)
        text = document.integers(0, 2**31, document.integers(500, 4000), np.int32)
        yield Work(text.tobytes() + rng.integers(0, 2**31, 100, np.int32).tobytes())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workload", nargs="+", choices="ABCDEF", default=list("ABCDE"))
    options.add_argument("--pool", type=int, metavar="TOKENS",
                         help="3,000,000 if not given, 200,000 for D")  # fmt: skip
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--trace", type=Path, help="the trace of workload F")
    options.add_argument("--curve", action="store_true", help="compare the curve to the exact one")
    args = options.parse_args()
    rows = Rows(args.json)
    if args.curve:
        traces: dict[str, Callable[[], Iterator[Work]]] = {"zipf": lambda: zipf(args.quick)}
        if args.trace:
            traces["F"] = lambda: workload_f(args.trace, args.quick)
        for name, make in traces.items():
            figures = compare(make(), args.pool or 3_000_000)
            rows.add(benchmark="miss-ratio curve", trace=name, **figures, machine=processor())
        return
    if "F" in args.workload and args.trace is None:
        options.error("--workload F needs --trace FILE")
    for name in args.workload:
        pool = args.pool or POOLS.get(name, 3_000_000)
        found: dict[str, list[dict[str, Any]]] = {pace: [] for pace in PACES}
        for _ in range(args.rounds):
            for pace, apart in PACES.items():
                requests = requests_of(name, args.trace, args.quick)
                found[pace].append(measure(requests, pool, apart))
        exact = found["one a second"][0]["causes"]
        for pace, rounds in found.items():
            figures = rounds[0]
            for key in (key for key in figures if "_over_" in key):
                figures[key] = round(statistics.median(each[key] for each in rounds), 4)
            for key in figures["times"]:
                figures["times"][key] = round(
                    statistics.median(each["times"][key] for each in rounds), 2
                )
            figures["off"] = {
                cause: round((figures["causes"][cause] - exact[cause])
                             / figures["prompt_tokens"] * 100, 3)
                for cause in figures["standard_errors"]
            }  # fmt: skip
            rows.add(benchmark="accounting", workload=name, pace=pace, pool_tokens=pool, **figures,
                     machine=processor())  # fmt: skip


if __name__ == "__main__":
    main()
