"""Traces in which prompts are used again in different ways, real ones and made-up ones.

A trace is a list of requests: the numbers of a prompt's blocks of 512 tokens (equal numbers mean
equal prefixes), the tokens of the prompt and of the output. Real traces are files in Mooncake's
format.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import NamedTuple

from common.tree_workloads import TRACE_BLOCK


class Request(NamedTuple):
    blocks: list[int]
    prompt: int  # tokens
    output: int  # tokens


Trace = list[Request]


def read(file: Path) -> Trace:
    """The requests of a file in Mooncake's format."""
    with file.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [Request(row["hash_ids"], row["input_length"], row["output_length"]) for row in rows]


def family(request: Request) -> int:
    """The conversation: all prompts of the conversation trace share their first block."""
    return request.blocks[min(1, len(request.blocks) - 1)]


def some_families(trace: Trace, odd: bool) -> Trace:
    """The requests of half of the conversations."""
    return [each for each in trace if (family(each) * 2654435761 >> 7) % 2 == odd]


def renumbered(*traces: Trace) -> list[Trace]:
    """The same traces, with no block in common."""
    found, base = [], 0
    for trace in traces:
        found.append([each._replace(blocks=[b + base for b in each.blocks]) for each in trace])
        base += 1 + max(block for each in trace for block in each.blocks)
    return found


def after_each_other(*traces: Trace) -> Trace:
    """One trace after the other: what was right for the first is wrong for the next."""
    return [request for trace in renumbered(*traces) for request in trace]


def in_turn(first: Trace, second: Trace, requests: int) -> Trace:
    """Stretches of so many requests of each, alternating."""
    one, other = renumbered(first, second)
    parts = [
        part[begin : begin + requests]
        for begin in range(0, max(len(one), len(other)), requests)
        for part in (one, other)
    ]
    return [request for part in parts for request in part]


def mixed(*traces: Trace, seed: int = 0) -> Trace:
    """The requests of all traces at random among each other, each trace in its order."""
    rng = random.Random(seed)
    renamed = renumbered(*traces)
    order = [number for number, trace in enumerate(renamed) for _ in trace]
    rng.shuffle(order)
    following = [iter(trace) for trace in renamed]
    return [next(following[number]) for number in order]


class _Maker:
    """Makes blocks and requests."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._number = count()

    def blocks(self, number: int) -> list[int]:
        return [next(self._number) for _ in range(number)]

    def request(self, blocks: list[int], output: int = 100) -> Request:
        return Request(blocks, len(blocks) * TRACE_BLOCK - self.rng.randrange(TRACE_BLOCK), output)

    def zipf(self, items: int, draws: int, power: float) -> list[int]:
        weights = [rank**-power for rank in range(1, items + 1)]
        return self.rng.choices(range(items), weights, k=draws)


def documents(
    requests: int = 6000, items: int = 2000, power: float = 0.9, seed: int = 1, once: float = 0.0
) -> Trace:
    """Questions to documents of fixed popularity; a share `once` are prompts that never return."""
    make = _Maker(seed)
    texts = [make.blocks(make.rng.randint(4, 36)) for _ in range(items)]
    trace = []
    for item in make.zipf(items, requests, power):
        if make.rng.random() < once:
            trace.append(make.request(make.blocks(make.rng.randint(10, 50))))
        else:
            trace.append(make.request(texts[item] + make.blocks(1)))
    return trace


def moving(requests: int = 6000, every: int = 500, seed: int = 2) -> Trace:
    """Documents whose popularity is drawn anew every so many requests."""
    make = _Maker(seed)
    texts = [make.blocks(20) for _ in range(1500)]
    trace = []
    for _ in range(0, requests, every):
        make.rng.shuffle(texts)
        trace += [
            make.request(texts[item] + make.blocks(1)) for item in make.zipf(1500, every, 1.1)
        ]
    return trace


def loop(requests: int = 6000, items: int = 300, seed: int = 3) -> Trace:
    """The same documents over and over in one order."""
    make = _Maker(seed)
    texts = [make.blocks(20) for _ in range(items)]
    return [make.request(texts[number % items] + make.blocks(1)) for number in range(requests)]


def recent(requests: int = 6000, mean: float = 60.0, fresh: float = 0.3, seed: int = 4) -> Trace:
    """A new prompt, or the k-th last different one, k exponential: what LRU is best at."""
    make = _Maker(seed)
    stack: list[list[int]] = []
    trace = []
    for _ in range(requests):
        depth = int(make.rng.expovariate(1 / mean))
        if depth < len(stack) and make.rng.random() >= fresh:
            blocks = stack.pop(len(stack) - 1 - depth)
        else:
            blocks = make.blocks(make.rng.randint(5, 40))
        stack.append(blocks)
        trace.append(make.request(blocks))
    return trace


def conversations(
    requests: int = 6000, stay: float = 0.75, pause: float = 150.0, seed: int = 5, systems: int = 1
) -> Trace:
    """Users who come back with probability `stay` after a pause, their prompt longer each time."""
    make = _Maker(seed)
    prompts = [make.blocks(make.rng.randint(2, 8)) for _ in range(systems)]
    waiting: list[tuple[float, int, list[int]]] = []
    trace = []
    for number in range(requests):
        if waiting and waiting[0][0] <= number:
            before = heapq.heappop(waiting)[2]
        else:
            before = prompts[make.zipf(systems, 1, 1.0)[0]] + make.blocks(make.rng.randint(0, 25))
        blocks = before + make.blocks(make.rng.randint(1, 4))
        trace.append(make.request(blocks, 300))
        if make.rng.random() < stay:
            back = number + 1 + make.rng.lognormvariate(0, 1.2) * pause
            heapq.heappush(waiting, (back, number, blocks))
    return trace


def tools(
    requests: int = 8000,
    items: int = 400,
    power: float = 1.1,
    steps: float = 0.5,
    seed: int = 6,
) -> Trace:
    """Agents with long instructions of Zipf popularity, whose runs are a few steps close in time.

    `steps` is the probability of another step after each.
    """
    make = _Maker(seed)
    texts = [make.blocks(make.rng.randint(3, 30)) for _ in range(items)]
    running: list[tuple[float, int, list[int]]] = []
    trace = []
    for number in range(requests):
        if running and running[0][0] <= number:
            before = heapq.heappop(running)[2]
        else:
            before = texts[make.zipf(items, 1, power)[0]] + make.blocks(make.rng.randint(1, 12))
        blocks = before + make.blocks(make.rng.randint(0, 2))
        trace.append(make.request(blocks))
        if make.rng.random() < steps:
            again = number + 1 + make.rng.expovariate(1 / 25)
            heapq.heappush(running, (again, number, blocks))
    return trace


def tenants(requests: int = 8000) -> Trace:
    """Tenants of five kinds among each other."""
    each = requests // 5
    return mixed(
        documents(each, 300, 1.0, 11),
        loop(each, 60, 12),
        conversations(each, 0.7, 40.0, 13),
        documents(each, 10, 0.5, 14, once=0.95),
        recent(each, 15.0, 0.3, 15),
    )


def thoughts(requests: int = 6000, seed: int = 7) -> Trace:
    """Random revisits of trees of thoughts of depth 6 and fan-out 3, a new one now and then."""
    make = _Maker(seed)
    trace: Trace = []
    trees: list[dict[int, list[int]]] = []
    for number in range(requests):
        if number % 40 == 0:
            trees = [*trees[-7:], {0: make.blocks(4)}]
        tree, node = make.rng.choice(trees), 0
        blocks = list(tree[0])
        for _ in range(make.rng.randint(1, 6)):
            node = 3 * node + 1 + make.rng.randrange(3)
            blocks += tree.setdefault(node, make.blocks(2))
        trace.append(make.request(blocks))
    return trace


def made_up() -> dict[str, Callable[[], Trace]]:
    """Traces by name, none of which needs a file."""
    return {
        "documents": documents,
        "few-documents": lambda: documents(6000, 300, 0.6, 21),
        "once": lambda: documents(once=0.6, seed=22),
        "loop": loop,
        "moving": moving,
        "recent": recent,
        "recent-far": lambda: recent(mean=250.0, seed=23),
        "conversations": conversations,
        "short-talks": lambda: conversations(8000, 0.45, 300.0, 24, systems=30),
        "tools": tools,
        "many-tools": lambda: tools(8000, 2000, 0.8, 0.1, 29),
        "tenants": tenants,
        "thoughts": thoughts,
        "documents>recent": lambda: after_each_other(documents(3000), recent(3000)),
        "recent>documents": lambda: after_each_other(recent(3000), documents(3000)),
        "loop>recent>loop": lambda: after_each_other(loop(2000), recent(2000), loop(2000, seed=25)),
        "tools>once": lambda: after_each_other(tools(4000), documents(3000, once=0.6, seed=26)),
        "loop|recent": lambda: in_turn(loop(4000), recent(4000), 400),
        "moving|once": lambda: in_turn(moving(4000), documents(4000, once=0.7, seed=27), 800),
        "talks+once": lambda: mixed(conversations(4000), documents(4000, once=0.9, seed=28)),
    }


def made_of(trace: Trace) -> dict[str, Trace]:
    """Parts of a trace: halves by time, halves by conversation."""
    half = len(trace) // 2
    return {
        "first half": trace[:half],
        "second half": trace[half:],
        "even families": some_families(trace, odd=False),
        "odd families": some_families(trace, odd=True),
    }


def tokens_of(trace: Iterable[Request]) -> int:
    """Tokens of all prompts."""
    return sum(request.prompt for request in trace)
