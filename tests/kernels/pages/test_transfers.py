"""Pages on their way out of a cache and back, on streams that run as late as they may."""

from __future__ import annotations

import random
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from simulated_streams import SimulatedStreams

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.pages import packing, transfers
from coppice.kernels.pages.packing import pack, packed_bytes
from coppice.kernels.pages.transfers import DeviceTransfers, PageTransfers, StagedRows

LAYERS, PAGES, SIZE = 3, 12, 4


def caches() -> list[LayerCache]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, PAGES, SIZE, 2, 8)
    return [LayerCache(*torch.randn(shape, generator=generator)) for _ in range(LAYERS)]


def content(rng: random.Random, count: int, width: int) -> torch.Tensor:
    """Random packed pages, of floats that are numbers."""
    floats = np.random.default_rng(rng.randrange(1 << 30)).random((count, width // 4), np.float32)
    return torch.from_numpy(floats).view(torch.uint8)


class Device:
    """A simulated device, and what each of its pages must hold by the order of the calls."""

    def __init__(self, seed: int, **options: float) -> None:
        self.rng = random.Random(seed)
        self.streams = SimulatedStreams(self.rng, **options)
        self.caches = caches()
        self.transfers = DeviceTransfers(lambda: self.caches, self.streams)
        self.width = packed_bytes(self.caches)
        self.expected = self.found()
        self.checks: list[tuple[torch.Tensor, np.ndarray]] = []  # what came, what was right
        self.waited = []

    def found(self) -> np.ndarray:
        """The packed pages as they are."""
        out = torch.empty((PAGES, self.width), dtype=torch.uint8)
        pack(self.caches, range(PAGES), out)
        return out.numpy()

    def some(self) -> list[int]:
        return self.rng.sample(range(PAGES), self.rng.randint(1, 5))

    def fill(self) -> None:
        pages = self.some()
        # They come in two buffers, in each of which other pages lie before and after.
        cut, parts = self.rng.randint(0, len(pages)), []
        with self.streams.host():
            rows = content(self.rng, len(pages), self.width)
            self.expected[pages] = rows.numpy()
            for part in (rows[:cut], rows[cut:]):
                if len(part):
                    other = content(self.rng, 1, self.width)
                    staged = self.transfers.stage(torch.cat([other, part, other]))
                    parts.append(StagedRows(staged, 1, len(part)))
        self.transfers.fill(pages, parts)

    def out(self) -> None:
        pages = self.some()
        given = None
        if self.rng.random() < 0.5:  # some columns of rows that others have, too
            with self.streams.host():
                given = torch.zeros((len(pages), self.width + 12), dtype=torch.uint8)[:, 4:-8]
        right, begin = self.expected[pages].copy(), 0
        for rows, ready in self.transfers.out(pages, given):
            part = right[begin : begin + len(rows)]
            if given is not None:
                assert rows.data_ptr() == given[begin].data_ptr()
            begin += len(rows)
            if self.rng.random() < 0.5:
                with self.streams.host():
                    ready()
                assert np.array_equal(rows.numpy(), part), "what came out is not what pages had"
            else:
                self.waited.append((rows, ready, part))
        assert begin == len(pages)

    def step(self) -> None:
        """Reads some pages and writes one of them, layer by layer."""
        pages = self.some()
        value, at = self.rng.random(), 0
        words = self.expected.view(np.float32)
        for cache in self.transfers.layers(pages):
            for each in (cache.k, cache.v):
                width = each[0].numel()
                read = each.reshape(PAGES, -1).index_select(0, torch.tensor(pages))
                self.checks.append((read, words[pages, at : at + width].copy()))
                each[pages[0]].fill_(value)
                words[pages[0], at : at + width] = value
                at += width

    def copy(self) -> None:
        """Copies one page to another, as before a step."""
        source, target = self.rng.sample(range(PAGES), 2)
        self.transfers.needed([source, target])
        for cache in self.caches:
            for each in (cache.k, cache.v):
                each[target].copy_(each[source])
        self.expected[target] = self.expected[source]

    def run(self, count: int) -> None:
        calls = [self.fill, self.out, self.step, self.copy, self.transfers.settle]
        with self.streams.steps():
            for _ in range(count):
                self.rng.choice(calls)()
                assert not self.streams.foreign, "memory of the other stream may be given away"
            self.transfers.needed(range(PAGES))
        assert not self.transfers.coming()
        for rows, ready, right in self.waited:
            with self.streams.host():
                ready()
            assert np.array_equal(rows.numpy(), right), "what came out is not what pages had"
        self.streams.finish()
        for read, right in self.checks:
            assert np.array_equal(read.numpy(), right), "a step has read something else"
        assert np.array_equal(self.found(), self.expected), "a page holds something else"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Most of what is copied to main memory comes in several pieces."""
    monkeypatch.setattr(packing, "_BLOCK_BYTES", 3 * packed_bytes(caches()))


@pytest.mark.parametrize("eager", [0.0, 0.3, 0.6])
def test_pages_hold_what_the_order_of_the_calls_says_however_late_streams_run(eager):
    for seed in range(8):
        Device(seed, eager=eager).run(40)


def test_without_a_wait_some_page_is_read_or_overwritten_too_early(monkeypatch):
    """Each kind of wait alone: of steps for copies, and of copies for steps."""
    wait = SimulatedStreams.wait

    def run() -> None:
        for seed in range(20):
            Device(seed, eager=0.3).run(40)

    for kind in ("steps", "copies"):

        def some_wait(self, event, kind=kind):
            if self._current != kind:
                wait(self, event)

        monkeypatch.setattr(SimulatedStreams, "wait", some_wait)
        with pytest.raises(AssertionError, match=r"has read something|not what pages|holds"):
            run()


def test_memory_of_which_the_other_stream_is_not_told_is_noticed(monkeypatch):
    monkeypatch.setattr(SimulatedStreams, "used", lambda self, tensor: None)
    with pytest.raises(AssertionError, match="may be given away"):
        Device(0).run(40)


def test_the_first_layer_is_there_before_the_last_one_is_copied():
    device = Device(3, steps_late=False)
    device.fill()
    [arrival] = device.transfers._arrivals
    pages = arrival.pages.tolist()
    elsewhere = next(page for page in range(PAGES) if page not in pages)
    assert device.transfers.layers([elsewhere]) is device.caches, "it waits for nothing"
    seen = []
    for _ in device.transfers.layers(pages):
        seen.append([event.query() for event in arrival.came])
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]
    assert not device.transfers.coming()


def test_what_has_come_is_put_into_its_pages_without_waiting():
    device = Device(4, steps_late=False)
    device.fill()
    device.transfers.settle()
    assert device.transfers.coming() and not device.streams.waits
    device.streams.finish()
    device.transfers.settle()
    assert not device.transfers.coming()
    device.fill()
    device.transfers.forget()
    assert not device.transfers.coming()


def test_memory_that_pages_are_copied_to_is_of_one_size_and_little_more_than_is_in_use(monkeypatch):
    """However many pages are copied at once: torch keeps what was pinned of each size for ever."""
    blocks, sizes = list[weakref.ref[np.ndarray]](), set[int]()

    def recorded(count: int, width: int, device: torch.device) -> torch.Tensor:
        block = np.empty((count, width), np.uint8)
        if count:
            sizes.add(block.nbytes)
            blocks.append(weakref.ref(block))
        return torch.from_numpy(block)  # which has it live as long as any part of it

    for module in (packing, transfers):
        monkeypatch.setattr(module, "host_rows", recorded)
    rng, device = random.Random(6), Device(6, steps_late=False)
    held, most = deque(), 0
    for _ in range(300):
        count = rng.choice([1, 1, 2, rng.randint(1, PAGES)])
        held += device.transfers.out(rng.sample(range(PAGES), count))
        for _ in range(rng.randint(0, len(held))):
            held.popleft().ready()  # as they are stored, in their order
        there = sum(each() is not None for each in blocks)
        most = max(most, there)
        in_use = sum(len(each.rows) for each in held)
        assert in_use <= there * 3 <= in_use + 2 * 3
    assert sizes == {3 * device.width} and len(blocks) > 100 and most > 3


def test_in_main_memory_pages_are_filled_at_once():
    rng, made = random.Random(5), caches()
    plain = PageTransfers(lambda: made)
    rows = content(rng, 4, plain.page_bytes)
    staged = plain.stage(rows)
    assert staged.parts[0] is rows, "nothing is copied twice"
    plain.fill([7, 2, 5], [StagedRows(staged, 1, 1), StagedRows(staged, 2, 2)])
    assert plain.layers([7]) is made
    [(out, ready)] = plain.out([7, 2, 5])
    assert ready is None and torch.equal(out, rows[1:])
    wide = torch.zeros((3, plain.page_bytes + 3), dtype=torch.uint8)
    [(out, ready)] = plain.out([7, 2, 5], wide[:, 1:-2])
    assert ready is None and torch.equal(wide[:, 1:-2], rows[1:])
    assert not wide[:, :1].any() and not wide[:, -2:].any()
