"""The hit rate of a cache that knows the future, and how much of it no other policy can reach.

    python benchmarks/clairvoyant.py --trace FILE [--pool TOKENS ...] [--json FILE]

Replays a trace in Mooncake's format by its blocks of 512 tokens. Outputs take no room. Of blocks
that a policy ranks equal, the end of a prompt is evicted first. A row has hit rates (hit tokens
over prompt tokens) and shares:

    lru           evicts the block that was unused for longest
    clairvoyant   evicts the block whose next use is farthest
    half_way      the mean of the two
    again_only    knows the next use of every block that was used at least twice; of the others it
                  evicts the oldest, whose next use it expects after a multiple of its age. The
                  multiple is the one that serves this trace best
    first_again   share of the clairvoyant's hits on blocks that had been used once until then
    once_only     share of all blocks that are used only once

Of a block that was used once, only its age is known: nothing else in its own past distinguishes
`first_again` from `once_only`.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path

from common.harness import Rows, parser
from common.tree_workloads import TRACE_BLOCK

NEVER = 1 << 60
Request = tuple[list[int], int]  # blocks, and tokens of the prompt


def read(trace: Path) -> list[Request]:
    with trace.open() as lines:
        requests = [json.loads(line) for line in lines]
    return [(request["hash_ids"], request["input_length"]) for request in requests]


def next_uses(requests: list[Request]) -> list[list[int]]:
    """For each request and block, the next request that uses the block."""
    following: dict[int, int] = {}
    uses = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number][0]
        uses.append([following.get(block, NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    uses.reverse()
    return uses


def simulate(requests: list[Request], places: int, known: int, waits: float) -> tuple[int, int]:
    """Hit tokens of a cache of `places` blocks, and those on blocks that had been used once.

    The next use of blocks with at least `known` uses is known. Of the others the oldest is expected
    after `waits` times its age. The block whose next use is farthest is evicted first.
    """
    following = next_uses(requests)
    last: dict[int, int] = {}  # of the cached, the last use
    uses: dict[int, int] = {}
    future: list[tuple[int, int, int, int]] = []  # farthest first: next use, depth, block, use
    past: list[tuple[int, int, int]] = []  # oldest first
    hits = first_again = 0
    for number, (blocks, length) in enumerate(requests):
        left = length - 1
        for block in blocks:
            if block not in last:
                break
            hits += (tokens := min(TRACE_BLOCK, left))
            left -= tokens
            first_again += tokens * (uses[block] == 1)
        for depth, (block, after) in enumerate(zip(blocks, following[number], strict=True)):
            uses[block] = uses.get(block, 0) + 1
            last[block] = number
            if uses[block] >= known:
                heapq.heappush(future, (-after, -depth, block, number))
            else:
                heapq.heappush(past, (number, -depth, block))
        while len(last) > places:
            while future and last.get(future[0][2]) != future[0][3]:
                heapq.heappop(future)
            while past and (last.get(past[0][2]) != past[0][0] or uses[past[0][2]] >= known):
                heapq.heappop(past)
            wait = -future[0][0] - number if future else -1
            if past and (number - past[0][0]) * waits >= wait:
                del last[heapq.heappop(past)[2]]
            else:
                del last[heapq.heappop(future)[2]]
    return hits, first_again


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, required=True)
    options.add_argument("--pool", nargs="+", type=int, default=[1_000_000, 3_000_000, 10_000_000])
    args = options.parse_args()
    requests = read(args.trace)
    prompt_tokens = sum(length for _, length in requests)
    counts: dict[int, int] = {}
    for blocks, _ in requests:
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1
    once = sum(count == 1 for count in counts.values()) / len(counts)
    rows = Rows(args.json)
    for pool in args.pool:
        places = pool // TRACE_BLOCK
        lru, _ = simulate(requests, places, NEVER, 1.0)
        best, first = simulate(requests, places, 0, 1.0)
        again = max(simulate(requests, places, 2, 2.0**power)[0] for power in range(-4, 11, 2))
        rows.add(
            benchmark="clairvoyant",
            pool_tokens=pool,
            lru=round(lru / prompt_tokens, 4),
            clairvoyant=round(best / prompt_tokens, 4),
            half_way=round((lru + best) / 2 / prompt_tokens, 4),
            again_only=round(again / prompt_tokens, 4),
            first_again=round(first / best, 3),
            once_only=round(once, 3),
        )


if __name__ == "__main__":
    main()
