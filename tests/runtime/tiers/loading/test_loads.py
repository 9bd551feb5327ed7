"""Which tiers are asked and read, in which order, and when they are given up."""

from __future__ import annotations

import random
import threading
from array import array

import numpy as np
import pytest
import torch
from fake_tiers import HandThreads, MemoryStore

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.pages.transfers import PageTransfers
from coppice.radix.mirror.leaving import Known
from coppice.radix.mirror.names import chain
from coppice.runtime.requests.request import Request, Sequence, Status
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.tiers.loading import loads
from coppice.runtime.tiers.loading.loads import Loads
from coppice.runtime.tiers.loading.rates import Rate
from coppice.runtime.tiers.store import TierFailed
from coppice.runtime.tiers.told import TierCounts, TiersTold

SIZE, WIDTH = 4, 64


def sequence(tokens: list[int], number: int = 0, priority: int = 0) -> Sequence:
    prompt = array("i", tokens)
    return Sequence(Request(str(number), prompt, SamplingParams(), None, number, 0, 1000, priority))


def fill(store: MemoryStore, tokens: list[int], first: int = 0, last: int = 1000) -> None:
    """Stores the pages `first` to `last` of a prompt."""
    keys = chain(b"root", array("i", tokens).tobytes(), 4 * SIZE)[first:last]
    store.store(keys, np.zeros((len(keys), WIDTH), np.uint8))


class Made:
    """Loads over stores, with a clock and threads that a test drives."""

    def __init__(self, *stores: MemoryStore, compute: float | None = None) -> None:
        self.now = 1000.0
        layer = LayerCache(*torch.zeros(2, 1, 1, 1, WIDTH // 2, dtype=torch.uint8))
        self.told = TiersTold({store.name: TierCounts() for store in stores})
        self.loads = Loads(
            stores,
            page_size=SIZE,
            transfers=PageTransfers(lambda: [layer]),
            root=lambda _: b"root",
            compute_seconds=lambda tokens, _: None if compute is None else compute * tokens,
            known=Known(100),
            told=self.told,
            clock=lambda: self.now,
        )
        self.asking = [HandThreads(random.Random(0)) for _ in stores]
        self.reading = [HandThreads(random.Random(0)) for _ in stores]
        for pools, ours in (
            (self.loads.finding.threads, self.asking),
            (self.loads.reading, self.reading),
        ):
            for pool in pools:
                pool.shutdown()
            pools[:] = ours
        self.loads._piece_pages = 2
        for rate in self.loads._rates:
            rate.observe(1 << 30, 1.0)

    def answer(self) -> None:
        for threads in self.asking:
            threads.work()
        self.loads.poll()

    def slow(self) -> list[int]:
        return [each.slow for each in self.told.tiers.values()]


TOKENS = list(range(3, 44))  # ten pages and a token


def test_what_one_tier_lacks_the_next_one_is_asked_for():
    first, second = MemoryStore(), MemoryStore(name="disk")
    fill(first, TOKENS, 0, 4)
    fill(second, TOKENS, 2, 9)
    fill(second, TOKENS[:38])  # of the tenth page two tokens agree
    made = Made(first, second)
    mine = sequence(TOKENS)
    made.loads.begin(mine, 5)
    load = made.loads.of(mine)
    made.answer()
    assert not load.finding
    assert made.told.found_tokens == 38 - 5
    found = load._found | load._flying
    assert {at: page.tier for at, page in found.items()} == dict.fromkeys(
        (1, 2, 3), 0
    ) | dict.fromkeys(range(4, 10), 1)
    assert found[9].place.tokens == 2
    assert made.loads.found() == [load] and not made.loads.found()
    assert load.bonus == 38 - 5, "nothing is known of what computing takes"


def test_the_bonus_is_what_loading_saves():
    store = MemoryStore()
    fill(store, TOKENS)
    made = Made(store, compute=1.0)
    made.loads._rates[0].observe(WIDTH << 30, 0.04 * (1 << 30))
    mine = sequence(TOKENS)
    made.loads.begin(mine, 0)
    made.answer()
    [load] = made.loads.found()
    assert load.bonus == round(40 * (1 - 0.4 / 40))
    made.loads._rates[0].observe(WIDTH, 1e15)
    other = sequence([9, *TOKENS], 1)
    fill(store, [9, *TOKENS])
    made.loads.begin(other, 0)
    made.answer()
    assert not made.loads.found(), "it is computed"


def test_a_tier_that_was_slow_once_is_tried_again():
    store = MemoryStore()
    fill(store, TOKENS)
    made = Made(store, compute=1.0)
    # Two hundred times as slow as computing: a machine that stood still, say.
    made.loads._rates[0] = Rate(1e9)
    made.loads._rates[0].observe(WIDTH, 200.0 * SIZE)
    for number in range(100):
        mine = sequence(TOKENS, number)
        made.loads.begin(mine, 0)
        made.answer()
        if made.loads.found():
            break
        assert made.loads.of(mine).over, "it is computed"
        made.loads.drop(mine)
    assert 10 < number < 99


def test_a_tier_that_does_not_answer_is_given_up_and_not_what_another_one_said():
    first, second = MemoryStore(), MemoryStore(name="disk")
    fill(first, TOKENS, 0, 4)
    made = Made(first, second)
    mine = sequence(TOKENS)
    made.loads.begin(mine, 0)
    made.asking[0].work()
    made.loads.poll()
    assert made.loads.waits(mine)
    made.now += 1.0
    made.loads.poll()
    assert made.slow() == [0, 1]
    assert not made.loads.waits(mine)
    made.reading[0].work()
    made.loads.poll()
    assert made.loads.next(made.loads.of(mine), 40).ready == 16
    made.asking[1].work()  # it answers after all
    made.loads.poll()
    assert made.loads.next(made.loads.of(mine), 40).ready == 16


def test_of_those_who_wait_for_a_silent_tier_one_waits_and_the_others_go_on_with_it():
    """The tier is left alone for a while, as one that fails, and asked again after that."""
    first, second = MemoryStore(), MemoryStore(name="disk")
    fill(second, TOKENS)
    lines = [[number, *TOKENS] for number in range(3, 7)]
    for tokens in lines:
        fill(second, tokens)
    made = Made(first, second)
    mine = [sequence(tokens, number) for number, tokens in enumerate(lines)]
    made.loads.begin(mine[0], 0)
    made.now += 0.15
    for each in mine[1:]:
        made.loads.begin(each, 0)
    made.now += 0.1
    made.loads.poll()
    assert made.slow() == [4, 0]
    made.asking[1].work()
    made.loads.poll()
    assert not any(map(made.loads.waits, mine))
    assert all(made.loads.of(each).flying for each in mine), "the next tier has it"
    later = sequence(TOKENS, 9)
    made.loads.begin(later, 0)
    assert made.loads.of(later).asking == 1, "it is left alone"
    made.asking[0].work()
    assert made.loads.of(later).asking == 1, "what it says too late is not listened to"
    made.loads.drop(later)
    made.now += loads._REST_SECONDS
    made.loads.begin(later, 0)
    assert made.loads.of(later).asking == 0 and made.slow() == [4, 0]


def test_a_tier_whose_thread_hangs_is_not_asked_before_it_has_come_back():
    """However long ago it was: its thread could not ask."""
    hanging, free = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def find(self, keys):
            hanging.set()
            assert free.wait(30)
            return super().find(keys)

    store = Hanging()
    fill(store, TOKENS)
    made = Made(store)
    thread = threading.Thread(target=made.asking[0].work, daemon=True)
    mine = sequence(TOKENS)
    made.loads.begin(mine, 0)
    thread.start()
    assert hanging.wait(30)
    made.now += 1.0
    made.loads.poll()
    assert not made.loads.waits(mine) and made.slow() == [1]
    made.now += 10 * loads._REST_SECONDS
    other = sequence(TOKENS[1:], 1)
    made.loads.begin(other, 0)
    assert made.loads.of(other) is None
    free.set()
    thread.join()
    made.loads.poll()
    assert not made.loads.of(mine).flying, "what it says too late is not listened to"
    made.loads.begin(other, 0)
    assert made.loads.waits(other)


@pytest.mark.parametrize("error", [TierFailed("on purpose"), KeyError("unforeseen")])
def test_a_tier_that_fails_is_left_alone_whatever_it_raises(error):
    """Those that wait for its answer go on to the next one with the load that has failed."""
    first, second = MemoryStore(), MemoryStore(name="disk")
    fill(second, TOKENS)
    fill(second, TOKENS[1:])

    def fails(keys):
        raise error

    first.find = fails
    made = Made(first, second)
    mine = [sequence(TOKENS), sequence(TOKENS[1:], 1)]
    for each in mine:
        made.loads.begin(each, 0)
    made.asking[0].work(1)
    made.loads.poll()
    assert made.told.tiers["host"].failures == 1 and made.slow() == [0, 0]
    assert all(future.cancelled() for future, *_ in made.asking[0].tasks)
    made.asking[1].work()
    made.loads.poll()
    assert all(made.loads.of(each).flying for each in mine)
    third = sequence(TOKENS[2:], 2)
    made.loads.begin(third, 0)
    assert made.loads.of(third).asking == 1, "it is left alone"


def test_a_tier_that_brings_something_is_not_given_up_however_many_wait_for_it():
    store = MemoryStore()
    made = Made(store)
    lines = [[number, *TOKENS] for number in range(3, 9)]
    for number, tokens in enumerate(lines):
        fill(store, tokens)
        made.loads.begin(sequence(tokens, number), 0)
    made.answer()
    while made.reading[0].tasks:
        made.now += 0.09
        made.reading[0].work(1)
        made.loads.poll()
    assert made.slow() == [0]
    assert all(load.staged == 11 for load in made.loads._loads.values())


def test_a_tier_that_brings_nothing_is_given_up():
    first, second = MemoryStore(), MemoryStore(name="disk")
    fill(first, TOKENS, 0, 4)
    fill(second, TOKENS, 4)
    made = Made(first, second)
    mine = sequence(TOKENS)
    made.loads.begin(mine, 0)
    made.answer()
    for _ in range(9):
        made.now += 0.12
        made.reading[0].work(1)
        made.loads.poll()
    assert made.slow() == [0, 1]
    load = made.loads.of(mine)
    assert made.loads.next(load, 40).ready == 16 and not load.coming
    made.reading[1].work()  # it goes on after all
    made.loads.poll()
    assert load.staged == 4
    assert second.loaded == 0 and not any(made.loads._pieces)


def test_the_middle_moves_with_what_is_measured():
    """What no thread has begun to read is taken back, as far as it is computed meanwhile."""
    store = MemoryStore()
    fill(store, TOKENS)
    made = Made(store, compute=1.0)
    made.loads._rates[0].observe(WIDTH << 30, SIZE << 30)  # both take as long
    mine = sequence(TOKENS)
    made.loads.begin(mine, 0)
    made.answer()
    load = made.loads.of(mine)
    assert load.together
    assert sorted(load._flying) == [5, 6, 7, 8, 9]
    mine.status = Status.RUNNING
    made.loads.poll()
    made.now += 6.0  # three times as fast as was expected
    mine.computed = 18
    made.loads.poll()
    assert sorted(load._flying) == [9]
    assert made.loads.next(load, 22).compute == 18
    made.reading[0].work()
    made.loads.poll()
    assert load.staged == 1 and store.loaded == 1
    made.loads.drop(mine)
    assert not made.loads._queued


def test_what_the_tree_loses_while_a_sequence_waits_is_asked_for_again():
    """Once more, and after that every few seconds; what is there already is not read twice."""
    store = MemoryStore()
    fill(store, TOKENS)
    made, mine = Made(store), sequence(TOKENS)
    made.loads.begin(mine, 22)
    assert not made.loads.asks_again(mine, 6), "they are asked now"
    made.answer()
    [load] = made.loads.found()
    made.reading[0].work(2)
    made.loads.poll()
    for cached in (22, 20, 30):
        assert not made.loads.asks_again(mine, cached), "the tree has no page less"
    assert made.loads.asks_again(mine, 6)
    made.answer()
    assert not made.loads.waits(mine)
    assert made.loads.found() == [load] and load.begin + load.bonus == 40
    assert made.told.found_tokens == 40 - 6
    assert load.account.found == [(6, 40)]
    assert not made.loads.asks_again(mine, 2), "it does not wait for ever"
    made.reading[0].work()
    made.loads.poll()
    made.now += loads._AGAIN_SECONDS
    assert made.loads.asks_again(mine, 2)
    made.answer()
    made.reading[0].work()
    made.loads.poll()
    assert made.loads.next(load, 40).ready == 40
    assert store.loaded == 10 and made.told.found_tokens == 40 - 2
    made.loads.took(load, made.loads.take(load, 40), 40)
    assert made.told.tiers["host"].loaded_tokens == 40


def test_what_several_have_lost_is_asked_for_once():
    store, lines = MemoryStore(), [[*TOKENS[:24], number, *TOKENS] for number in (7, 8)]
    for tokens in lines:
        fill(store, tokens)
    made = Made(store)
    mine, other = (sequence(tokens, number) for number, tokens in enumerate(lines))
    for each in (mine, other):
        made.loads.begin(each, 24)
        made.answer()
    for each in (mine, other, other):
        made.loads.begin(each, 0)
        assert made.loads.asks_again(each, 0)
    assert made.loads.of(mine).begin == 0 and made.loads.of(other).begin == 24
    made.answer()
    made.loads.begin(other, 0)
    assert not made.loads.waits(other)
    assert made.loads.asks_again(other, 0), "the other one has it read"
    mine.status = Status.RUNNING
    made.loads.begin(other, 24)
    assert not made.loads.asks_again(other, 24) and not made.loads.waits(other)
    made.loads.drop(mine)
    assert made.loads.asks_again(other, 8) and made.loads.of(other).begin == 8
    made.loads.drop(other)
    assert not made.loads._coming and not made.loads._behind


@pytest.mark.parametrize("priority", [0, -1])
def test_a_better_class_does_not_wait_for_what_a_worse_one_loads(priority):
    store = MemoryStore()
    fill(store, TOKENS)
    made = Made(store)
    made.loads.begin(sequence(TOKENS), 0)
    other = sequence(TOKENS, 1, priority)
    made.loads.begin(other, 0)
    assert (made.loads.of(other) is None) == (priority == 0)
    made.answer()
    assert made.loads.waits(other) == (priority == 0)


def test_of_a_slow_tier_little_is_read_at_once():
    store = MemoryStore()
    fill(store, TOKENS)
    made = Made(store)
    made.loads._piece_pages = 8
    assert made.loads._at_a_time() == [8]
    made.loads._rates[0].observe(WIDTH << 30, 0.01 * (1 << 30))
    assert made.loads._at_a_time() == [3]
    made.loads._rates[0].observe(WIDTH << 30, 100.0 * (1 << 30))
    assert made.loads._at_a_time() == [1]
    made.loads.begin(sequence(TOKENS), 0)
    made.answer()
    assert made.loads._pieces == [10]


def begun() -> tuple[MemoryStore, Made, Sequence]:
    """A store that has all pages of a sequence, which are about to be read."""
    store = MemoryStore()
    fill(store, TOKENS)
    made, mine = Made(store), sequence(TOKENS)
    made.loads.begin(mine, 0)
    made.answer()
    return store, made, mine


def test_what_is_dropped_is_not_read():
    store, made, mine = begun()
    made.loads.drop(mine)
    made.reading[0].work()
    assert store.loaded == 0 and not any(made.loads._pieces)


def test_what_is_dropped_while_a_thread_reads_for_it_is_forgotten():
    store, made, mine = begun()
    made.reading[0].work(1)
    made.loads.poll()
    load = made.loads.of(mine)
    assert load.staged == 2
    load_bytes = store.load

    def while_it_reads(*given):
        made.loads.drop(mine)
        return load_bytes(*given)

    store.load = while_it_reads
    made.reading[0].work(1)
    made.reading[0].work()
    made.loads.poll()
    assert not made.loads._queued and load.staged == 0
    assert not any(made.loads._pieces)


def test_nothing_is_about_to_come_for_a_sequence_that_has_nothing_to_compute():
    """A beam that waits for its siblings takes no pages; others must not wait for it to do so."""
    _, made, mine = begun()
    made.reading[0].work(1)
    made.loads.poll()
    mine.status = Status.RUNNING
    assert made.loads.about_to_come
    mine.computed = len(mine.tokens)
    assert not made.loads.about_to_come


@pytest.mark.parametrize("running", [False, True])
def test_what_is_read_beforehand_is_bounded(running, monkeypatch):
    """However many wait or run; of those that run each has a piece."""
    name = "_RUNNING_BYTES" if running else "_STAGED_BYTES"
    monkeypatch.setattr(f"coppice.runtime.tiers.loading.loads.{name}", 6 * WIDTH)
    store = MemoryStore()
    mine = [sequence([900 + number, *TOKENS], number) for number in range(5)]
    for each in mine:
        fill(store, each.tokens.tolist())
    made = Made(store)
    for each in mine:
        made.loads.begin(each, 0)
        if running:
            each.status = Status.RUNNING
    made.answer()
    theirs = [made.loads.of(each) for each in mine]
    held = sum(load.staged + load.flying for load in theirs)
    assert held == (6 + 4 * 2 if running else 6)
    made.reading[0].work()
    made.loads.poll()
    assert sum(load.staged + load.flying for load in theirs) == held
    for each in mine[:4]:
        made.loads.drop(each)
    made.loads.poll()
    assert theirs[4].staged + theirs[4].flying >= 6, "there is room again"


def test_what_no_tier_has_is_not_known():
    """A server may have forgotten it: then it is to be written again."""
    store = MemoryStore()
    fill(store, TOKENS, 0, 4)
    made = Made(store)
    keys = chain(b"root", array("i", TOKENS).tobytes(), 4 * SIZE)
    for key in keys:
        made.loads._known.add(key.name)
    made.loads.begin(sequence(TOKENS), 0)
    made.answer()
    assert [key.name in made.loads._known for key in keys[:10]] == [True] * 4 + [False] * 6
