"""Tens of thousands of random operations with recounts, after which nothing is left.

    COPPICE_FUZZ_OPERATIONS=1000000 .venv/bin/pytest tests/radix/test_fuzz.py

runs a million under each policy, which takes minutes; the default is short.
"""

from __future__ import annotations

import gc
import os
import random
from array import array
from collections.abc import Hashable

import pytest

from coppice.radix import (
    POLICIES,
    Hold,
    Namespace,
    Node,
    OutOfPages,
    PageEvents,
    PagePool,
    PagesRemoved,
    PagesStored,
    PinRefused,
    Pins,
    RadixTree,
    check,
)

OPERATIONS = int(os.environ.get("COPPICE_FUZZ_OPERATIONS", "12000"))
RECOUNT_EVERY = max(200, OPERATIONS // 500)
NAMESPACES = (None, Namespace("m"), Namespace("m", cache_salt="s"))


class Fuzz:
    """A tree with running sequences, pins and a listener, driven at random."""

    def __init__(self, policy: str, page_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tree = RadixTree(PagePool(2048 // page_size, page_size), policy)
        self.now = 0.0
        self.pins = Pins(self.tree, 0.2, lambda: self.now)
        self.events = PageEvents(self.tree, limit=1_000_000)
        self.stored: set[int] = set()
        # Lock, page table, tokens, whether it inserts drafts.
        self.lines: list[tuple[Hold, array[int], array[int], bool]] = []
        self.wanted: list[tuple[array[int], Hashable]] = []
        # Prompts are made of few segments, so that they share, nest and diverge.
        self.segments = [
            [self.rng.randrange(50) for _ in range(self.rng.choice((1, 3, 16, 40)))]
            for _ in range(12)
        ]

    def prompt(self) -> array[int]:
        count = self.rng.randint(1, 8)
        return array("i", [t for _ in range(count) for t in self.rng.choice(self.segments)])

    def start(self) -> None:
        tree, size, tokens = self.tree, self.tree.page_size, self.prompt()
        match = tree.match(tokens, self.rng.choice(NAMESPACES), len(tokens) - 1)
        needed = -(-len(tokens) // size) - match.length // size
        if needed > tree.available_pages(match):
            return
        hold, table = tree.start(match)
        assert table == tree.page_table(hold)
        if hold.length % size and not tree.claim_tail(hold):
            table[-1] = tree.allocate(1)[0]
        table += tree.allocate(-(-len(tokens) // size) - len(table), table[-1] if table else -1)
        self.lines.append((hold, table, tokens, self.rng.random() < 0.3))

    def insert(self) -> None:
        hold, table, tokens, draft = self.rng.choice(self.lines)
        count = self.rng.randint(hold.length, len(tokens))
        begin = self.rng.randint(0, hold.length)
        draft = draft and self.rng.random() < 0.9
        self.tree.insert(hold, tokens[begin:count], table, begin=begin, draft=draft)

    def generate(self) -> None:
        _, table, tokens, _ = self.rng.choice(self.lines)
        more = self.rng.choice(self.segments)
        missing = -(-(len(tokens) + len(more)) // self.tree.page_size) - len(table)
        try:
            table += self.tree.allocate(max(0, missing), table[-1])
        except OutOfPages:
            return
        tokens.extend(more)

    def fork(self) -> None:
        hold, table, tokens, draft = self.rng.choice(self.lines)
        self.tree.insert(hold, tokens, table, draft=draft)
        own = hold.length // self.tree.page_size
        tail = len(table) > own
        if tail and not self.tree.pool.free_pages + self.tree.evictable_pages:
            return
        child = self.tree.fork(hold)
        copied = table[:own]
        if tail:  # the child writes to a copy of the unfinished page
            copied += self.tree.allocate(1)
        self.lines.append((child, copied, tokens[:], draft))

    def finish(self) -> None:
        hold, table, tokens, draft = self.lines.pop(self.rng.randrange(len(self.lines)))
        if self.rng.random() < 0.5:
            count = self.rng.randint(hold.length, len(tokens))
            begin = self.rng.randint(0, hold.length)
            self.tree.finish(hold, tokens[begin:count], table, begin=begin)
            return
        if self.rng.random() < 0.8:
            self.tree.insert(hold, tokens, table, draft=draft)
        self.tree.release(hold, table, drop=draft and self.rng.random() < 0.8)

    def want(self) -> None:
        """Wants what a sequence has entered, or settles what was wanted before."""
        tree = self.tree
        if len(self.wanted) < 8 and self.rng.random() < 0.6:
            hold, _, tokens, _ = self.rng.choice(self.lines)
            self.wanted.append((tokens[: hold.length], hold.namespace))
            tree.want(tree.match(*self.wanted[-1]))
        elif self.wanted:
            tokens, namespace = self.wanted.pop(self.rng.randrange(len(self.wanted)))
            match = tree.match(tokens, namespace)
            if match.length == len(tokens):
                tree.unwant(match)
            if self.rng.random() < 0.3:
                tree.unlock(tree.lock(match))
            else:
                tree.drop(match)

    def pin(self) -> None:
        self.now += self.rng.random()
        name = str(self.rng.randrange(6))
        if not self.pins.unpin(name):
            try:
                ttl = self.rng.choice((None, 5.0))
                self.pins.pin(name, self.prompt(), self.rng.choice(NAMESPACES), ttl=ttl)
            except PinRefused:
                pass
        self.pins.refresh()

    def step(self) -> None:
        chance = self.rng.random()
        if not self.lines or (chance < 0.35 and len(self.lines) < 12):
            self.start()
        elif chance < 0.5:
            self.insert()
        elif chance < 0.6:
            self.generate()
        elif chance < 0.66:
            self.fork()
        elif chance < 0.9:
            self.finish()
        elif chance < 0.93:
            self.want()
        elif chance < 0.96:
            self.tree.evict(self.rng.randint(0, 20))
        else:
            self.pin()

    def recount(self) -> None:
        pinned = [(pin.hold, array("i")) for pin in self.pins if pin.hold is not None]
        check(self.tree, [(hold, table) for hold, table, _, _ in self.lines] + pinned)
        for event in self.events.drain():
            if isinstance(event, PagesStored):
                assert not self.stored.intersection(event.hashes), "stored twice"
                self.stored.update(event.hashes)
            elif isinstance(event, PagesRemoved):
                assert self.stored.issuperset(event.hashes), "removed, but never stored"
                self.stored.difference_update(event.hashes)

    def end(self) -> None:
        while self.lines:
            self.finish()
        self.pins.clear()
        self.tree.evict(self.tree.pool.num_pages)
        self.recount()
        assert not self.stored
        assert self.tree.pool.free_runs() == [(0, self.tree.pool.num_pages)]
        assert self.tree.num_nodes == self.tree.cached_tokens == self.tree.locked_pages == 0


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_nothing_leaks(page_size: int) -> None:
    """Once for all policies: beside other tests there are millions of objects to go through."""
    gc.collect()
    before = sum(type(each) is Node for each in gc.get_objects())
    for policy in POLICIES:
        fuzz = Fuzz(policy, page_size, seed=page_size)
        for operation in range(OPERATIONS // 4):
            fuzz.step()
            if operation % RECOUNT_EVERY == 0:
                fuzz.recount()
        assert fuzz.tree.evicted_tokens > 0, "the pool was never short"
        fuzz.end()
        del fuzz
    gc.collect()
    after = sum(type(each) is Node for each in gc.get_objects())
    assert after <= before, "a node outlived its tree"
