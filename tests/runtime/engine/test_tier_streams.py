"""Random schedules whose pages cross to tiers and back on a simulated stream of their own.

The fake model compares every key that it reads with what its tokens give, layer by layer.
"""

from __future__ import annotations

import random

import pytest
from fake_model import WrongKV, fake_checkpoint
from fake_tiers import MemoryStore
from random_schedules import RandomSchedule
from simulated_streams import SimulatedStreams

from coppice.kernels.pages.transfers import DeviceTransfers
from coppice.runtime.schedule.queue import SCHEDULING_POLICIES

_DEEP = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


def run(checkpoint, seed: int) -> tuple[int, int]:
    """One schedule; returns tokens that came back, and waits for events."""
    streams = SimulatedStreams(random.Random(seed), steps_late=False, eager=seed % 3 * 0.2)
    policy = SCHEDULING_POLICIES[seed % len(SCHEDULING_POLICIES)]
    schedule = RandomSchedule(
        seed, checkpoint, policy, [MemoryStore(random.Random(seed))],
        transfers=lambda engine: DeviceTransfers(lambda: engine.runner.kv_cache, streams),
    )  # fmt: skip
    try:
        schedule.run()
        assert not streams.foreign
    except (Exception, WrongKV) as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        schedule.engine.end_tiers(0.0)
    return sum(schedule.loaded.values()), streams.waits


@pytest.mark.parametrize("seeds", [(4, 13), pytest.param(range(200), marks=_DEEP)])
def test_no_page_is_read_or_overwritten_too_early(checkpoint, seeds):
    found = [run(checkpoint, seed) for seed in seeds]
    assert all(map(sum, zip(*found, strict=True))), "nothing came back, or nothing waited"


@pytest.mark.parametrize(
    ("where", "name"),
    [(SimulatedStreams, "wait"), (DeviceTransfers, "_fill")],
    ids=["no step waits for its pages", "no step fills its pages"],
)
def test_what_is_left_out_is_noticed(checkpoint, monkeypatch, where, name):
    monkeypatch.setattr(where, name, lambda self, *arguments: None)

    def some() -> None:
        for seed in (4, 13):
            run(checkpoint, seed)

    with pytest.raises((WrongKV, AssertionError)):
        some()
