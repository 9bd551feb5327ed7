"""Random operations over a tree and its tiers, whose threads die and whose folder is opened anew.

Each token that is served is compared with what was computed: see `RandomSchedule`.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_model import WrongKV, fake_checkpoint
from random_schedules import RandomSchedule
from unsteady_store import UnsteadyStore

from coppice.kernels.pages.packing import packed_bytes
from coppice.runtime.schedule.queue import SCHEDULING_POLICIES
from coppice.runtime.tiers import exchange, writer
from coppice.runtime.tiers.disk.folder import content
from coppice.runtime.tiers.disk.store import DiskStore
from coppice.runtime.tiers.host import HostStore
from coppice.runtime.tiers.loading import loads
from coppice.runtime.tiers.store import Store


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


def leave(store: Store) -> None:
    """As the end of a process leaves it."""
    if isinstance(store, DiskStore):
        store._held.release()
        store._segments.close()
        store._index.close()


class Counted:
    """Counts the calls of a scheduler's `Paging`, each of which does something with the tree."""

    def __init__(self, paging) -> None:
        self.calls = 0
        for name in ("match", "cached", "admit", "fork", "try_grow", "commit", "leave"):
            setattr(paging, name, partial(self._call, getattr(paging, name)))

    def _call(self, function, *arguments, **options):
        self.calls += 1
        return function(*arguments, **options)


def damage(folder: Path, rng: random.Random) -> None:
    """Flips a bit of a segment."""
    files = sorted(content(folder).glob("*.kv"))
    path = rng.choice(files) if files else None
    if path is not None and (size := path.stat().st_size):
        with path.open("r+b") as file:
            file.seek(rng.randrange(size))
            [byte] = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "operations",
    [6_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(14_000)])],
)
def test_every_token_that_is_served_is_what_was_computed(
    checkpoint, tmp_path, operations, monkeypatch
):
    """Host and disk, both too small; seeds follow each other until there were enough operations.

    Each seed twice: its second engine finds the folder of the first.
    """
    for module in (loads, writer):
        monkeypatch.setattr(module, "_REST_SECONDS", 0.0)
    monkeypatch.setattr(exchange, "_TELL_SECONDS", 0.0)
    done = kills = reopenings = loaded = warmed = damaged = compared = number = 0
    alone = RandomSchedule.alone_engine(checkpoint)
    while done < operations:
        before = done
        seed, again = divmod(number, 2)
        number += 1
        rng = random.Random(number)
        policy = SCHEDULING_POLICIES[seed % len(SCHEDULING_POLICIES)]
        folder = tmp_path / str(seed)
        try:
            schedule, stores = with_stores(seed, checkpoint, policy, folder, rng)
            tiers = schedule.engine.tiers
            tiers.loads._compute_seconds = lambda tokens, context: None  # it always loads
            counted = Counted(schedule.engine.scheduler.paging)
            if rng.random() < 0.3:
                damage(folder, rng)
            schedule.run()
            if seed % 20 == 0:
                compared += schedule.compare_with_each_alone(alone)
        except (Exception, WrongKV) as error:
            error.add_note(f"seed {seed}")
            raise
        told = tiers.told
        loaded += sum(each.loaded_tokens for each in told.tiers.values())
        warmed += sum(each.warmed_tokens for each in told.tiers.values())
        damaged += sum(each.damaged for each in stores)
        schedule.engine.end_tiers(rng.choice([0.0, 5.0]))
        done += counted.calls + sum(each.operations for each in stores)
        kills += sum(each.kills for each in stores)
        reopenings += sum(each.reopenings for each in stores)
        if again:
            shutil.rmtree(folder)
        if done // 50_000 > before // 50_000:
            print(done, end=" ", flush=True)
    print(
        f"{done:,} operations, {kills} kills, {reopenings} reopenings, {number} engines, "
        f"{loaded:,} tokens loaded, {warmed:,} brought back, {damaged} damaged pages, "
        f"{compared} outputs compared"
    )
    assert kills and reopenings and loaded
    assert warmed or operations < 1_000_000, "few engines are idle for long"


def with_stores(seed, checkpoint, policy, folder, rng):
    """A schedule whose engine has a host tier and a disk tier, the folder being that of others."""
    made: list[UnsteadyStore] = []

    def stores(engine) -> list[UnsteadyStore]:
        width = packed_bytes(engine.runner.kv_cache)
        host = partial(HostStore, 12 * width, width, torch.device("cpu"))
        disk = partial(DiskStore, folder, 200 * (width + 200), width)
        made.extend(UnsteadyStore(each, leave, rng) for each in (host, disk))
        return made

    return RandomSchedule(seed, checkpoint, policy, stores), made
