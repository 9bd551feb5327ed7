"""How well a strong learner predicts which blocks are used again, and what a cache gains by it.

    pip install lightgbm  # 4.7 for the rows in results/
    python benchmarks/reuse_prediction.py --trace FILE [--pool TOKENS ...] [--json FILE]

Replays a trace in Mooncake's format by its blocks of 512 tokens, in a cache that evicts in the
order which gradient boosting (LightGBM) predicts. For every use of a block the model learns the
rate of its next use at each age, from what a cache knows at that time (`FEATURES`). From the rates
follows a density (a Gittins index: the most hits a request that keeping the block can earn from its
age on); the least dense leaf is evicted first. This is the computation of the policy `density`,
with better rates. Evicted blocks stay known, and outputs take no room.

A row's `lru` and `hit_rate` are hit tokens over prompt tokens. `knowledge` names the features:
`age and uses` (those of the policy `density`) or `all`. `seen` names what the model learned from:

    others    the conversations are split in halves by their second block; each half is predicted by
              a model of the other half. A policy in an engine learns from less: only from the past
    itself    the model has seen the blocks that it predicts, with their future. What this gains
              over `others` is memory, not prediction; with more leaves it nears the clairvoyant
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numba
import numpy as np

from common.harness import Rows, parser
from common.tree_workloads import TRACE_BLOCK

# The first age, in requests, of each interval in which the rate counts as constant.
AGES = np.array([0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096])
NEVER = 1 << 40
PIECE = 16  # the most blocks of equal history that are learned as one
FEATURES = (
    "uses", "depth", "blocks after", "blocks of the prompt", "of these known", "of these new",
    "after the known", "gap before this use", "gap before that", "gap of the conversation",
    "turns", "continues a prompt", "cut off that prompt", "its output", "output", "tokens new",
    "tokens mod block", "requests in the last minute", "children", "children where it left",
    "uses of the second block", "uses of the parent", "uses of the last block",
    "requests since first use", "uses where it left", "prompt as long as the last",
)  # fmt: skip


class Trace:
    """The uses of a trace's blocks, in the order of requests.

    The uses of request i are `start[i]` to `start[i + 1]`. Arrays by use: `block` (its number),
    `request`, `depth`, `known` (used before), `after` (requests until the block's next use), `seen`
    (requests until the end of the trace), `tokens` (that a hit saves). By block: `parent` (-1:
    none). By request: `prompts` and `outputs` (tokens), `times` (seconds), `family` (the
    conversation, named by its second block).
    """

    def __init__(self, file: Path, limit: int | None) -> None:
        with file.open() as lines:
            requests = [json.loads(line) for line in lines][:limit]
        self.prompts = np.array([request["input_length"] for request in requests])
        self.outputs = np.array([request["output_length"] for request in requests])
        self.times = np.array([request["timestamp"] for request in requests]) / 1000
        paths = [np.array(request["hash_ids"]) for request in requests]
        self.start = np.cumsum([0, *map(len, paths)])
        self.block = np.concatenate(paths)
        self.request = np.repeat(np.arange(len(paths)), np.diff(self.start))
        self.depth = np.arange(len(self.block)) - self.start[self.request]
        self.parent = np.full(self.block.max() + 1, -1)
        inner = self.depth > 0
        self.parent[self.block[inner]] = self.block[:-1][inner[1:]]
        self.family = np.array([path[min(1, len(path) - 1)] for path in paths])
        order = np.lexsort((self.request, self.block))
        again = self.block[order][1:] == self.block[order][:-1]
        self.after = np.full(len(self.block), NEVER)
        gaps = np.diff(self.request[order])
        self.after[order[:-1][again]] = gaps[again]
        self.known = np.zeros(len(self.block), np.bool_)  # used before
        self.known[order[1:][again]] = True
        self.seen = len(paths) - 1 - self.request
        left = self.prompts[self.request] - 1 - self.depth * TRACE_BLOCK
        self.tokens = np.clip(left, 0, TRACE_BLOCK)


def features(trace: Trace) -> np.ndarray:
    """FEATURES of each use, float32 [uses, features], from what is known at the time of the use."""
    count = len(trace.parent)
    uses, children = np.zeros((2, count), np.int64)
    last, gap, older, first = np.full((4, count), -1)
    turns = np.ones(len(trace.prompts), np.int64)
    table = np.empty((len(trace.block), len(FEATURES)), np.float32)
    recent = np.searchsorted(trace.times, trace.times - 60)
    for i, (begin, end) in enumerate(zip(trace.start[:-1], trace.start[1:], strict=True)):
        path, size = trace.block[begin:end], end - begin
        known = int(trace.known[begin:end].sum())
        leaves = path[max(known - 1, 0)]  # the last known block
        before = last[leaves] if known > 1 else -1
        talks = before >= 0
        cut = trace.start[before + 1] - trace.start[before] - known if talks else -1
        continues = talks and cut <= 1
        if continues:
            turns[i] = turns[before] + 1
        new = path[known:]
        children[leaves] += known > 0 and len(new) > 0
        children[new[:-1]] += 1
        old = path[:known]
        older[old] = gap[old]
        gap[old] = i - last[old]
        last[path] = i
        uses[path] += 1
        first[new] = i
        depth = np.arange(size)
        more = trace.prompts[i] - TRACE_BLOCK * known
        if continues:
            more = trace.prompts[i] - trace.prompts[before] - trace.outputs[before]
        columns = (
            uses[path], depth, size - 1 - depth, size, known, size - known, depth - known,
            gap[path], older[path], i - before if talks else -1, turns[i], continues, cut,
            trace.outputs[before] if talks else -1, trace.outputs[i], more,
            trace.prompts[i] % TRACE_BLOCK, i - recent[i], children[path], children[leaves],
            uses[path[min(1, size - 1)]], np.append(0, uses[path[:-1]]), uses[path[-1]],
            i - first[path], uses[leaves], talks and trace.prompts[i] == trace.prompts[before],
        )  # fmt: skip
        for column, values in enumerate(columns):
            table[begin:end, column] = values
    return table


class Pieces:
    """Pieces: neighbouring uses of equal history, which are learned as one.

    `of` has the piece of each use, `middle` a use in the middle of each piece. `hits` (blocks) and
    `waited` (blocks times requests) are [pieces, ages].
    """

    def __init__(self, trace: Trace, table: np.ndarray) -> None:
        history = [FEATURES.index(name) for name in ("uses", "gap before this use", "children")]
        new = np.ones(len(table), np.bool_)
        new[1:] = (
            (table[1:, history] != table[:-1, history]).any(axis=1)
            | (trace.depth[1:] % PIECE == 0)
            | (trace.depth[1:] == 1)
            | (table[1:, FEATURES.index("blocks after")] == 0)
        )
        self.of = np.cumsum(new) - 1
        begins = new.nonzero()[0]
        self.middle = begins + (np.bincount(self.of) - 1) // 2
        self.family = trace.family[trace.request[begins]]
        # All prompts share the first block: it is not learned, and never evicted.
        self.learned = trace.depth[begins] > 0
        shape = (len(begins), len(AGES))
        self.hits, self.waited = np.zeros(shape), np.zeros(shape)
        end = np.minimum(trace.after, trace.seen)
        widths = np.diff(AGES, append=NEVER)
        for age, (begin, width) in enumerate(zip(AGES, widths, strict=True)):
            waits = (end >= begin) & (trace.seen > begin)
            hit = waits & (trace.after >= begin) & (trace.after - begin < width)
            waited = waits * np.clip(end - begin + 1, 1, width)
            self.hits[:, age] = np.bincount(self.of, hit, len(begins))
            self.waited[:, age] = np.bincount(self.of, waited, len(begins))


def learned_rates(
    pieces: Pieces,
    table: np.ndarray,
    learn: np.ndarray,
    wanted: np.ndarray,
    leaves: int,
    rounds: int,
) -> np.ndarray:
    """Hits a request of the pieces `wanted` (numbers) at each age, learned from `learn` (mask)."""
    import lightgbm

    def rows(piece: np.ndarray, age: np.ndarray) -> np.ndarray:
        return np.column_stack([table[pieces.middle[piece]], AGES[age].astype(np.float32)])

    piece, age = ((pieces.waited > 0) & (learn & pieces.learned)[:, None]).nonzero()
    waited = pieces.waited[piece, age]
    # In hits per 1,000 requests. Few rates exceed 1, and those above 30 make boosting unstable.
    target = np.minimum(pieces.hits[piece, age] / waited * 1000, 30)
    data = lightgbm.Dataset(rows(piece, age), label=target, weight=waited / 100)
    options: dict[str, Any] = {
        "objective": "poisson", "num_leaves": leaves, "min_data_in_leaf": 5000 * 15 // leaves,
        "learning_rate": 0.1, "feature_fraction": 0.6, "bagging_fraction": 0.6, "bagging_freq": 1,
        "poisson_max_delta_step": 0.5, "max_bin": 63, "lambda_l2": 10, "num_threads": 1,
        "seed": 0, "deterministic": True, "verbose": -1,
    }  # fmt: skip
    model = lightgbm.train(options, data, rounds)
    shape = (len(wanted), len(AGES))
    piece, age = np.broadcast_arrays(wanted[:, None], np.arange(len(AGES)))
    predicted = model.predict(rows(piece.ravel(), age.ravel()), num_threads=1)
    return np.clip(np.asarray(predicted).reshape(shape) / 1000, 1e-7, 1.0)


def densities(rates: np.ndarray, longest: int) -> np.ndarray:
    """The most hits a request from each age on, over all ages until which a block could be kept."""
    widths = np.diff(AGES, append=max(longest, AGES[-1]) + 1)
    best = np.zeros_like(rates)
    for age in range(len(AGES)):
        kept = np.ones(len(rates))
        earned, spent = np.zeros((2, len(rates)))
        for later in range(age, len(AGES)):
            rate = rates[:, later]
            gone = kept * -np.expm1(-rate * widths[later])
            earned, spent, kept = earned + gone, spent + gone / rate, kept - gone
            best[:, age] = np.maximum(best[:, age], earned / spent)
    return best


@numba.njit
def simulate(
    start: np.ndarray,
    block: np.ndarray,
    parent: np.ndarray,
    tokens: np.ndarray,
    density: np.ndarray,  # by use and interval
    interval: np.ndarray,  # by age
    places: int,
) -> int:
    """Hit tokens of a cache of `places` blocks.

    Evicts the leaf of least density, of equals the one unused for longest.
    """
    count = len(parent)
    cached = np.zeros(count, np.bool_)
    children = np.zeros(count, np.int64)
    last_use = np.zeros(count, np.int64)
    last = np.zeros(count, np.int64)
    leaves = np.empty(count, np.int64)
    at = np.full(count, -1)  # of each leaf, its index in `leaves`
    number = used = hits = 0
    for request in range(len(start) - 1):
        hit = True
        for use in range(start[request], start[request + 1]):
            one = block[use]
            hit = hit and cached[one]
            if hit:
                hits += tokens[use]
            last_use[one], last[one] = use, request
            if cached[one]:
                continue
            cached[one] = True
            used += 1
            above = parent[one]
            if above >= 0:
                children[above] += 1
                if at[above] >= 0:
                    number -= 1
                    leaves[at[above]] = leaves[number]
                    at[leaves[number]] = at[above]
                    at[above] = -1
            leaves[number] = one
            at[one] = number
            number += 1
        while used > places:
            worst, least = -1, np.inf
            for place in range(number):
                one = leaves[place]
                worth = density[last_use[one], interval[request - last[one]]]
                if worth < least or (worth == least and last[one] < last[worst]):
                    worst, least = one, worth
            cached[worst] = False
            used -= 1
            number -= 1
            leaves[at[worst]] = leaves[number]
            at[leaves[number]] = at[worst]
            at[worst] = -1
            above = parent[worst]
            if above >= 0:
                children[above] -= 1
                if not children[above]:
                    leaves[number] = above
                    at[above] = number
                    number += 1
    return hits


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, required=True)
    options.add_argument("--pool", nargs="+", type=int, default=[1_000_000, 3_000_000, 10_000_000])
    args = options.parse_args()
    trace = Trace(args.trace, 1000 if args.quick else None)
    table = features(trace)
    pieces = Pieces(trace, table)
    count = len(trace.prompts)
    interval = np.searchsorted(AGES, np.arange(count), side="right") - 1
    everything = np.arange(len(pieces.middle))
    half = (pieces.family * 2654435761 >> 7) % 2 == 1
    rows = Rows(args.json)

    def hit_rate(density: np.ndarray, interval: np.ndarray, pool: int) -> float:
        places = pool // TRACE_BLOCK
        hits = simulate(
            trace.start, trace.block, trace.parent, trace.tokens, density, interval, places
        )
        return round(hits / int(trace.prompts.sum()), 4)

    recency = trace.request[:, None].astype(np.float64)
    lru = {pool: hit_rate(recency, np.zeros_like(interval), pool) for pool in args.pool}
    for knowledge, seen, leaves, rounds in (
        ("age and uses", "others", 15, 60),
        ("all", "others", 15, 60),
        ("all", "itself", 15, 60),
        ("all", "itself", 31, 100),
    ):
        used = table if knowledge == "all" else table[:, : FEATURES.index("uses") + 1]
        rates = np.empty((len(everything), len(AGES)))
        if seen == "itself":
            rates[:] = learned_rates(
                pieces, used, np.ones(len(half), np.bool_), everything, leaves, rounds
            )
        else:
            for one in (half, ~half):
                wanted = (~one).nonzero()[0]
                rates[wanted] = learned_rates(pieces, used, one, wanted, leaves, rounds)
        density = densities(rates, count)[pieces.of]
        density[trace.depth == 0] = np.inf
        for pool in args.pool:
            rows.add(
                benchmark="reuse prediction",
                pool_tokens=pool,
                knowledge=knowledge,
                seen=seen,
                leaves=leaves,
                rounds=rounds,
                lru=lru[pool],
                hit_rate=hit_rate(density, interval, pool),
            )


if __name__ == "__main__":
    main()
