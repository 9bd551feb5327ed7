"""Requests on trees whose policy keeps a history, and a recount of that history."""

from __future__ import annotations

import random
from collections import Counter

from coppice.radix import Node, PagePool, RadixTree, check
from coppice.radix.eviction.adaptive import Adaptive
from coppice.radix.eviction.density import HitDensity
from coppice.radix.eviction.past_uses import History
from coppice.radix.eviction.records import Record

Request = tuple[list[int], list[int]]  # prompt, output


def document(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(1 << 20), k=length)


def serve(tree: RadixTree, prompt: list[int], output: list[int], chunk: int = 1 << 30) -> int:
    """One request, its prompt in chunks, on pages of one token; returns the tokens that hit."""
    match = tree.match(prompt[:-1])
    hold = tree.lock(match)
    table = tree.page_table(hold)
    ends = [*range(match.length + chunk, len(prompt), chunk), len(prompt)]
    if output:
        ends.append(len(prompt) + len(output))
    tokens = prompt + output
    for end in ends:
        table += tree.allocate(end - len(table))
        tree.insert(hold, tokens[:end], table)
    tree.release(hold, table)
    return match.length


def hit_rate(policy: str, capacity: int, requests: list[Request]) -> float:
    """Percent of the prompt tokens."""
    tree = RadixTree(PagePool(capacity, 1), policy=policy)
    hits = sum(serve(tree, *request) for request in requests)
    check(tree)
    return 100 * hits / sum(len(prompt) for prompt, _ in requests)


def history_of(tree: RadixTree) -> History:
    assert isinstance(tree.order, (HitDensity, Adaptive))
    return tree.order._history


def path(node: Node) -> list[Record]:
    """The records from the top to the end of `node`."""
    records = []
    record: Record | None = node.policy_data
    while record is not None and record.parent is not None:
        records.append(record)
        record = record.parent
    return records[::-1]


def check_history(tree: RadixTree, alone: bool = True) -> None:
    """Records cover the nodes exactly, ghosts are below them, and every count is a recount.

    `alone`: requests ran one after another, so shadow caches hold beginnings of prompts only.
    """
    history = history_of(tree)
    records, _ = history.sample(1 << 30)
    live = []
    for node in tree.nodes():
        assert node.parent is not None
        above = node.parent.policy_data
        edge = []
        record: Record | None = node.policy_data
        while record is not None and record is not above:
            edge.append(record)
            record = record.parent
        assert record is above, "the records of a node do not begin where its parent's end"
        assert edge and edge[0].start + edge[0].length == node.end
        assert edge[-1].start == node.start
        live += edge
    assert Counter(map(id, live)) == Counter(id(record) for record in records if record.live)
    for record in records:
        assert record.length > 0
        assert record.parent is not None
        assert record.parent.live or not record.live, "a live record below a ghost"
        parent = record.parent
        assert parent.parent is None or parent.start + parent.length == record.start
        assert list(parent.children.values()).count(record) == 1
    ghosts = [record for record in records if not record.live]
    assert history._num_ghosts == len(ghosts) <= history._max_ghosts
    for shadow in history._shadows:
        held = [record for record in records if record.held & shadow.bit]
        assert shadow.tokens == sum(record.length for record in held)
        for record in held:
            above = record.parent
            assert not alone or above.parent is None or above.held & shadow.bit
