"""Our router beside others' rules, in a simulated cluster of 2 to 1,000 replicas.

    python benchmarks/router.py [--trace FILE] [--replicas N ...] [--requests N] [--rules NAME ...]
                                [--workloads NAME ...] [--seeds N ...] [--json FILE] [--quick]

Each replica has a real radix tree with LRU eviction and 400,000 tokens, computes prompts one after
another at 8,000 tokens a second, slower the more sequences decode beside them, and runs 48
together. What a replica stores reaches our router after 50 ms. Requests come at random at a rate of
0.75 of what the cluster could take if its hits were those of one cache as large as all together.
The same requests go to all rules. A row has, of one rule:

    hit_rate       tokens that need not be computed; `one_cache`: those of that one cache
    p50, p99       times to the first token over those of our router
    busiest        tokens computed by the busiest replica over the mean
    busiest_time   the same of the seconds for which prompts were computed
    decision_ms    of our router, and bytes of its index for a cached token
    copied         of our router: tokens, as a share, that were computed though another replica
                   held them: first copies of what is hot, and what is not worth to wait for

`guessing` is our router without what replicas report: prompts on their way are all that it knows.
"""

from __future__ import annotations

import argparse
import random
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# Python puts a script's own folder on the import path; its packages lie beside it.
from common.harness import Rows, parser, processor
from routing.cluster import EACH, PLACES, PREFILL, STEP, Policy, one_cache, simulate
from routing.policies import (
    ConsistentHashing,
    LeastLoad,
    Ours,
    PowerOfTwo,
    Random,
    RayPrefix,
    RoundRobin,
    SglangCacheAware,
)
from routing.workloads import MIXES, TOKEN_BYTES, Work, trace

CACHE, USE = 400_000, 0.75


def works_of(name: str, file: Path | None, replicas: int, count: int, seed: int) -> list[Work]:
    """Requests at a rate that uses `USE` of the cluster."""

    def made(rate: float) -> list[Work]:
        rng = random.Random(replicas + 10_000 * seed)
        if name == "trace":
            assert file is not None
            return list(trace(file, count, rate, rng))
        return list(MIXES[name](count, rate, rng))

    works = made(1.0)
    hit = one_cache(works, CACHE * replicas)
    tokens = sum(len(work.prompt) for work in works) / TOKEN_BYTES / len(works)
    generated = sum(work.generated for work in works) / len(works)
    del works  # of 1,000 replicas they take gigabytes
    # A prompt's seconds while half of the places decode; a place's seconds.
    prefill = tokens * (1 - hit) / PREFILL * 1.5 + STEP
    decode = generated * (STEP + EACH * PLACES / 2) / PLACES
    return made(USE * replicas / max(prefill, decode))


def rules(replicas: int) -> dict[str, Callable[[], Policy]]:
    blocks = CACHE // 64
    rng = random.Random(1)
    return {
        "coppice": lambda: Ours(replicas, PLACES, PREFILL),
        "guessing": lambda: Ours(replicas, PLACES, PREFILL),
        "random": lambda: Random(replicas, rng),
        "round robin": lambda: RoundRobin(replicas, rng),
        "least load": lambda: LeastLoad(replicas, rng),
        "power of two": lambda: PowerOfTwo(replicas, rng),
        "consistent hashing": lambda: ConsistentHashing(replicas, rng),
        "sglang cache_aware": lambda: SglangCacheAware(replicas, rng, blocks),
        "ray prefix": lambda: RayPrefix(replicas, rng, blocks),
    }


def quantiles(first: Sequence[float]) -> tuple[float, float]:
    return float(np.percentile(first, 50)), float(np.percentile(first, 99))


def index_bytes(works: Sequence[Work], replicas: int) -> float:
    """Bytes of our index for a token that any replica holds."""
    policy = Ours(replicas, PLACES, PREFILL)
    tracemalloc.start()
    simulate(works[:2000], replicas, CACHE, _Only(policy), feed=True)
    index = policy.router.index
    found = sum(
        stat.size
        for stat in tracemalloc.take_snapshot().statistics("filename")
        if stat.traceback[0].filename.endswith(("mirror/index.py", "mirror/changes.py"))
    )
    tracemalloc.stop()
    return found / max(1, index.tokens)


class _Only:
    """A policy that keeps no changes itself."""

    def __init__(self, policy: Ours) -> None:
        self.choose, self.began = policy.choose, policy.began
        self.ended, self.changed, self.held = policy.ended, policy.changed, policy.held


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's conversation trace")
    options.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64])
    options.add_argument("--requests", type=int, help="default: 300 a replica, at least 3,000")
    options.add_argument("--workloads", nargs="+", metavar="NAME", help="default: all")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--rules", nargs="+", metavar="NAME", help="default: all")
    args = options.parse_args()
    rows = Rows(args.json)
    names = [*MIXES, *(["trace"] if args.trace else [])]
    for seed in args.seeds:
        for replicas in args.replicas:
            for name in args.workloads or names:
                beside_each_other(name, replicas, seed, args, rows)


def beside_each_other(
    name: str, replicas: int, seed: int, args: argparse.Namespace, rows: Rows
) -> None:
    """Sends the same requests to all rules; a row each."""
    each, least = (40, 600) if args.quick else (300, 3000)
    count = args.requests or min(max(each * replicas, least), 20_000)
    works = works_of(name, args.trace, replicas, count, seed)
    whole = one_cache(works, CACHE * replicas)
    ours = (1.0, 1.0)
    for rule, make in rules(replicas).items():
        if args.rules and rule not in args.rules:
            continue
        policy = make()
        result = simulate(works, replicas, CACHE, policy, feed=rule == "coppice")
        found = quantiles(result.first)
        more: dict[str, float] = {}
        if isinstance(policy, Ours) and rule == "coppice":
            ours = found
            more = {
                "decision_ms": round(policy.milliseconds, 3),
                "copied": round(result.copied / result.tokens, 4),
            }
            if not args.quick:
                more["index_bytes"] = round(index_bytes(works, replicas), 1)
        rows.add(
            benchmark="router", workload=name, replicas=replicas, seed=seed, rule=rule,
            requests=len(works), hit_rate=round(result.hits / result.tokens, 4),
            one_cache=round(whole, 4), p50=round(found[0] / ours[0], 2),
            p99=round(found[1] / ours[1], 2),
            busiest=round(max(result.computed) / np.mean(result.computed), 2),
            busiest_time=round(max(result.busy) / np.mean(result.busy), 2),
            **more, **processor(),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
